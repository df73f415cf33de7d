# SPDX-License-Identifier: Apache-2.0
"""What all parts of `vllm-omni demo` have in common: an answer is printed while it is made, a verdict follows, and all
results become a page with pictures, sound players, texts, and a timeline of the stages. The page needs no network."""

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from vllm_omni.entrypoints.omni_llm import OmniLLM
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import OmniRequestOutput

QUESTION = "What is the capital of France?"
"""The sentence to answer, if none is given."""
Verdict = Literal["right", "wrong", "not judged", "cut short"]
"""`not judged`: nobody knows what is right. `cut short`: the answer has reached its maximum length."""

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --waits: #a8c7fa; --works: #0b57d0; }
body { font: 16px/1.4 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
article { display: grid; grid-template-columns: 10rem 1fr; gap: 0 1.5rem; border-top: 1px solid var(--line);
  padding: 1.5rem 0; }
article > div { min-width: 0; overflow-wrap: break-word; }
h2 { font-size: 1rem; margin: 0; } audio { width: 100%; } code { background: #8882; padding: .1rem .3rem; }
img { width: 100%; max-width: 10rem; image-rendering: pixelated; border: 1px solid var(--line); }
.text { font-size: 1.3rem; margin: .3rem 0; } .note { opacity: .75; } .note, .legend { margin: .3rem 0; }
.right { color: #1e8e3e; } .wrong { color: #d93025; } .open { color: #b06000; }
.timeline { display: grid; grid-template-columns: max-content 1fr max-content; gap: .2rem .6rem; margin-top: .8rem;
  font-size: .8rem; align-items: center; }
.bar { display: flex; } .bar i, .legend i { height: .75rem; } .legend i { display: inline-block; width: 1.5rem; }
.waits { background: var(--waits); } .works { background: var(--works); }
@media (max-width: 40rem) { body { margin: 1rem auto; } article { grid-template-columns: 1fr; gap: .5rem; } }
"""
_LEGEND = """<p class=legend>Bars are the time of each stage in a request:
<i class=waits></i> until its first output, <i class=works></i> from then on.
<span class=right>right</span> and <span class=wrong>wrong</span> are judged by programs that know what is expected;
<span class=open>not judged</span> is what nobody knows, <span class=open>cut short</span> an answer at its maximum
length.</p>
"""
_NEXT = """<h2>Next</h2>
<p>Serve the model: run <code>{command}</code>, and when it has started open <a href="{page}">{page}</a>.{docs}</p>
"""


@dataclass
class DemoAnswer:
    """
    Attributes:
        speech: float32 `[samples]`, 24 kHz.
        first_audio: Seconds from the request to the first of them.
        seconds: Until the last of them.
        is_cut: The text has reached its maximum length.
        output: That of the speech.
    """

    text: str
    speech: torch.Tensor
    first_audio: float
    seconds: float
    is_cut: bool
    output: OmniRequestOutput


def stream_answer(omni: OmniLLM, content: str | list[dict[str, Any]], **options: Any) -> DemoAnswer:
    """Prints the text while it is generated."""
    started, first_audio = time.perf_counter(), 0.0
    messages: list[Any] = [{"role": "user", "content": content}]
    for event in omni.chat(messages, stream=True, **options):
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, ARSegmentEvent) and event.final_output_type == "text":
            print(event.text.replace("\n", "\n      "), end="", flush=True)
        elif isinstance(event, ARSegmentEvent):
            first_audio = first_audio or time.perf_counter() - started
    print()
    assert isinstance(event, CompletedEvent)
    text, speech = event.outputs
    return DemoAnswer(
        text=text.outputs[0].text,
        speech=speech.multimodal_output["audio"],
        first_audio=first_audio,
        seconds=time.perf_counter() - started,
        is_cut=text.outputs[0].finish_reason == "length",
        output=speech,
    )


def print_verdict(what: str, is_right: bool, note: str) -> None:
    print(f"      {what} {'right' if is_right else 'WRONG'}: {note}", flush=True)


@dataclass
class DemoResult:
    """What was checked.

    Attributes:
        model: The name of the checkpoint.
        text: What the model wrote, or painted.
        verdict: A part of the result that is wrong makes it wrong.
        picture, sound: Files in the page's folder.
        output: With the metrics of the stages.
    """

    model: str
    title: str
    text: str
    note: str
    verdict: Verdict
    picture: str | None
    sound: str | None
    output: OmniRequestOutput


@dataclass
class DemoRun:
    """One run, which its parts share.

    Attributes:
        sentence: To be answered.
        folder: Gets pictures and sounds.
        seed: Of what is random.
        num_steps: Of all parts.
        results: What was checked, in order.
    """

    sentence: str
    folder: Path
    seed: int
    num_steps: int
    results: list[DemoResult] = field(default_factory=list)
    _step: int = 0

    def step(self, text: str, end: str = "\n") -> None:
        """Prints the number of the next step, and what it does."""
        self._step += 1
        gap = "\n" if self._step > 1 else ""
        print(f"{gap}[{self._step}/{self.num_steps}] {text}", end=end, flush=True)


def write_page(folder: Path, results: list[DemoResult]) -> Path:
    """Writes `index.html`, which names the first result's model as the one to be served next."""
    parts = "\n".join(_article(result) for result in results)
    page = folder / "index.html"
    page.write_text(
        "<!doctype html>\n<html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>vllm-omni demo</title>\n<style>{_STYLE}</style>\n"
        f"<h1>vllm-omni demo</h1>\n{_LEGEND}{parts}\n{_next(folder, results[0].model)}</html>\n"
    )
    return page


def _next(folder: Path, model: str) -> str:
    vllm = Path(sys.executable).with_name("vllm")
    with contextlib.suppress(ValueError):
        vllm = vllm.relative_to(Path.cwd())
    flags, path = (" --playground", "playground") if find_spec("gradio") else ("", "docs")
    quickstart = Path(__file__).parents[3] / "docs" / "quickstart.md"  # In a checkout.
    link = os.path.relpath(quickstart, folder)
    docs = f' The next steps are in <a href="{escape(link)}">the quickstart</a>.' if quickstart.exists() else ""
    command, page = f"{vllm} serve {model} --omni{flags}", f"http://localhost:8000/{path}"
    return _NEXT.format(command=escape(command), page=page, docs=docs)


def _article(result: DemoResult) -> str:
    picture = f'<img src="{result.picture}" alt="">' if result.picture else ""
    sound = f'<audio controls src="{result.sound}"></audio>' if result.sound else ""
    verdict = result.verdict
    style = verdict if verdict in ("right", "wrong") else "open"
    return (
        f"<article><div>{picture}</div><div><h2>{escape(result.title)}: <span class={style}>{verdict}</span></h2>\n"
        f"<p class=text>{escape(result.text)}</p>{sound}<p class=note>{escape(result.note)}</p>\n"
        f"{_timeline(result.output.stage_metrics)}</div></article>"
    )


def _timeline(stages: list[StageMetrics]) -> str:
    """One bar for each stage, darker from its first output."""
    begin = min(stage.arrival for stage in stages)
    scale = 100 / max(max(stage.finished for stage in stages) - begin, 1e-6)
    rows = []
    for stage in stages:
        first = stage.finished if stage.first_output is None else stage.first_output
        before, waits, works = stage.arrival - begin, first - stage.arrival, stage.finished - first
        rows.append(
            f"<span>{escape(stage.name)}</span><div class=bar>"
            f'<i class=waits style="margin-left:{before * scale:.1f}%;width:{waits * scale:.1f}%"></i>'
            f'<i class=works style="width:{works * scale:.1f}%"></i></div><span>{stage.seconds:.2f} s</span>'
        )
    return f"<div class=timeline>{''.join(rows)}</div>"
