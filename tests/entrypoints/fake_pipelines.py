# SPDX-License-Identifier: Apache-2.0
"""Pipelines of fake stages, which need no model and start fast."""

import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import psutil
import pytest
import torch
import yaml

from tests.orchestrator.pipelines import fake_stage, fresh_stats
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent
from vllm_omni.orchestrator.request import PipelineRequest

LLM = TypeVar("LLM", bound=OmniBase)

# The writer generates tokens and rows; with `WINDOWS` the speaker reads the rows in windows of three.
WRITER = fake_stage(0, "writer", (), "text")
SPEAKER = fake_stage(1, "speaker", (0,), "audio")
STAGES = (WRITER, SPEAKER)
WINDOWS = {"edges": [{"from": 0, "to": 1, "window_size": 3, "unit": "rows"}]}


def make_pipeline(cls: type[LLM], path: Path, stages: Iterable[dict] = STAGES, *, args: dict, **runtime: Any) -> LLM:
    """Starts a pipeline with arguments `args` of `cls`, and `runtime` in the stage configuration."""
    path.write_text(yaml.safe_dump({"stage_args": list(stages), "runtime": runtime}))
    return cls("", str(path), **args)


@contextmanager
def running(
    cls: type[LLM], folder: Path, stages: Iterable[dict] = STAGES, args: dict | None = None, **runtime: Any
) -> Iterator[LLM]:
    with make_pipeline(cls, folder / "stages.yaml", stages, args=args or {}, **runtime) as llm:
        yield llm


def fake_prompt(text: str = "p", modalities: list[str] | None = None, **options: Any) -> dict[str, Any]:
    """A prompt with options of the fake stages."""
    prompt: dict[str, Any] = {"prompt": text, "additional_information": options}
    return prompt if modalities is None else prompt | {"modalities": modalities}


def long_prompt(text: str = "p", **options: Any) -> dict[str, Any]:
    """A prompt whose text is generated for much longer than a test takes."""
    return fake_prompt(text, fake_tokens=100_000, fake_seconds=0.01, fake_only="writer", **options)


def make_chat(num_tokens: int) -> dict[str, Any]:
    """A prompt of `num_tokens` for the tiny Qwen3-Omni, of which 8 are not text; the talker's prompt has 6 more."""
    text = "!" * (num_tokens - 8)
    return {"prompt": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"}


def is_idle(llm: OmniBase) -> bool:
    """Whether no stage has a request, after it has processed all messages that were sent to it."""
    stats = fresh_stats(llm._pipeline.orchestrator)
    return len(stats) > 0 and all(s.num_running == s.queue_depth == 0 for s in stats)


@contextmanager
def submissions(llm: OmniBase) -> Iterator[threading.Event]:
    """An event that is set when a request was submitted in this block. To ask `is_idle` again and again would never end
    for one that ends between two answers."""
    orchestrator = llm._pipeline.orchestrator
    submit, was_submitted = orchestrator.submit, threading.Event()

    def watched_submit(request: PipelineRequest, **options: Any) -> None:
        submit(request, **options)
        was_submitted.set()

    with mock.patch.object(orchestrator, "submit", watched_submit):
        yield was_submitted


def in_a_fork(llm: OmniBase, work: Callable[[], Any]) -> str:
    """What `work` returns or raises, as text, in a fork of this process, which another thread's locks are held in."""
    orchestrator = llm._pipeline.orchestrator
    locks: tuple[Any, ...] = (llm.builder.lock, orchestrator._lock, orchestrator._admission._changed)
    reader, writer = os.pipe()
    with ThreadPoolExecutor(1) as other:
        for lock in locks:
            other.submit(lock.acquire).result()
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            try:
                answer = str(work())
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writer, answer.encode())
            os._exit(0)
        for lock in locks:
            other.submit(lock.release).result()
    os.close(writer)
    with open(reader) as answers:
        answer = answers.read()
    os.waitpid(pid, 0)
    return answer


def wait_until_free(llm: OmniBase) -> None:
    """No stage has a request, and the engines free their KV blocks, which they do between two steps."""
    assert is_idle(llm)
    deadline = time.monotonic() + 120
    while any(stage.kv_blocks_used for stage in llm.stats()):
        assert time.monotonic() < deadline, llm.stats_table()


def descendants(title: str) -> set[psutil.Process]:
    """The processes below this one that have this in their command line."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # It has ended.
            if title in " ".join(process.cmdline()):
                found.add(process)
    return found


def wait_until_ended(processes: Iterable[psutil.Process]) -> None:
    """For processes whose parent has ended: a zombie has ended too, and waits for the system's first process."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)  # There is no event for it.


def set_deadline(llm: OmniBase, monkeypatch: pytest.MonkeyPatch, text: str, timeout_s: float | None) -> None:
    """Requests for the prompt `text` have this deadline, whatever that of the pipeline is."""
    build = llm.builder.build

    def build_with_deadline(prompt: Any, *args: Any, **kwargs: Any) -> PipelineRequest:
        request = build(prompt, *args, **kwargs)
        if text == (prompt if isinstance(prompt, str) else prompt["prompt"]):
            request.timeout_s = timeout_s
        return request

    monkeypatch.setattr(llm.builder, "build", build_with_deadline)


def record_events(llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch) -> list[OmniEvent]:
    """All events of the pipeline from now on."""
    events: list[OmniEvent] = []

    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[OmniEvent, None]:
        async with aclosing(AsyncOmniLLM.generate(llm, *args, **kwargs)) as original:
            async for event in original:
                events.append(event)
                yield event

    monkeypatch.setattr(llm, "generate", generate)
    return events


def by_request(events: Iterable[OmniEvent]) -> dict[str, list[OmniEvent]]:
    groups: dict[str, list[OmniEvent]] = {}
    for event in events:
        groups.setdefault(event.request_id, []).append(event)
    return groups


def check_events(events: list[OmniEvent]) -> CompletedEvent:
    """Checks the events of a completed request: order, one terminal event, and segments that add up to the outputs."""
    assert [event.sequence for event in events] == list(range(len(events)))
    assert [event.is_terminal for event in events] == [False] * (len(events) - 1) + [True]
    assert sorted(event.ts for event in events) == [event.ts for event in events]
    end = events[-1]
    assert isinstance(end, CompletedEvent), end
    for output in end.outputs:
        segments = [e for e in events if isinstance(e, ARSegmentEvent) and e.stage_id == output.stage_id]
        assert [segment.is_last for segment in segments] == [False] * (len(segments) - 1) + [True]
        for completion in output.outputs:
            own = [segment for segment in segments if segment.index == completion.index]
            assert "".join(segment.text for segment in own) == completion.text
            assert [token for segment in own for token in segment.tokens] == list(completion.token_ids)
        for name, tensor in output.multimodal_output.items():
            parts = [segment.multimodal_output[name] for segment in segments if name in segment.multimodal_output]
            assert torch.equal(torch.cat(parts), tensor)
    return end
