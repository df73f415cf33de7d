# SPDX-License-Identifier: Apache-2.0
"""What all steps of `vllm-omni demo` have in common: an answer is printed while it is made, a verdict follows, and all
results become a page with pictures, sound players, texts, and a timeline of the stages. The page needs no network."""

import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from vllm_omni.entrypoints.omni_llm import OmniLLM
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import OmniRequestOutput

_STYLE = """
body { font: 16px/1.4 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
article { display: grid; grid-template-columns: 10rem 1fr; gap: 0 1.5rem; border-top: 1px solid #ccc;
  padding: 1.5rem 0; }
h2 { font-size: 1rem; margin: 0; } img { width: 100%; image-rendering: pixelated; border: 1px solid #ccc; }
.text { font-size: 1.3rem; margin: .3rem 0; } .note { color: #666; margin: .3rem 0; } audio { width: 100%; }
.right { color: #187a2f; } .wrong { color: #b3261e; } svg { width: 100%; margin-top: .8rem; }
"""
_WIDTH, _ROW = 600, 20
_LABEL = 90
"""Of the timeline, in its units: width, height of a stage, and the width of its name."""


@dataclass
class Answer:
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


def stream_answer(omni: OmniLLM, content: str | list[dict[str, Any]], **options: Any) -> Answer:
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
    return Answer(
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
        text: What the model wrote, or painted.
        picture, sound: Files in the page's folder.
        output: With the metrics of the stages.
    """

    title: str
    text: str
    note: str
    is_right: bool
    picture: str | None
    sound: str | None
    output: OmniRequestOutput


def write_page(folder: Path, results: list[DemoResult]) -> Path:
    """Writes `index.html`."""
    parts = "\n".join(_article(result) for result in results)
    page = folder / "index.html"
    page.write_text(
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>vllm-omni demo</title>\n<style>{_STYLE}</style>\n"
        f"<h1>vllm-omni demo</h1>\n{parts}\n</html>\n"
    )
    return page


def _article(result: DemoResult) -> str:
    picture = f'<img src="{result.picture}" alt="">' if result.picture else ""
    sound = f'<audio controls src="{result.sound}"></audio>' if result.sound else ""
    verdict = "right" if result.is_right else "wrong"
    return (
        f"<article><div>{picture}</div><div><h2>{escape(result.title)}: <span class={verdict}>{verdict}</span></h2>\n"
        f"<p class=text>{escape(result.text)}</p>{sound}<p class=note>{escape(result.note)}</p>\n"
        f"{_timeline(result.output.stage_metrics)}</div></article>"
    )


def _timeline(stages: list[StageMetrics]) -> str:
    """One bar for each stage, darker from its first output."""
    begin = min(stage.arrival for stage in stages)
    end = max(stage.finished for stage in stages)
    scale = (_WIDTH - _LABEL - 60) / max(end - begin, 1e-6)
    bars = []
    for row, stage in enumerate(stages):
        x, y = _LABEL + (stage.arrival - begin) * scale, row * _ROW
        first = stage.finished if stage.first_output is None else stage.first_output
        waiting, working = (first - stage.arrival) * scale, (stage.finished - first) * scale
        bars.append(
            f'<text x="0" y="{y + 14}">{escape(stage.name)}</text>'
            f'<rect x="{x:.1f}" y="{y + 4}" width="{waiting:.1f}" height="12" fill="#a8c7fa"/>'
            f'<rect x="{x + waiting:.1f}" y="{y + 4}" width="{working:.1f}" height="12" fill="#0b57d0"/>'
            f'<text x="{x + waiting + working + 6:.1f}" y="{y + 14}">{stage.seconds:.2f} s</text>'
        )
    return f'<svg viewBox="0 0 {_WIDTH} {len(stages) * _ROW}" font-size="12">{"".join(bars)}</svg>'
