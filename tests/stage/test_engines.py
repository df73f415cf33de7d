# SPDX-License-Identifier: Apache-2.0
"""Engines that are plain Python: an error fails only its request, and nothing runs after `stop`."""

import ctypes
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.stage.running_engine import PATIENCE
from vllm_omni.config.stage import OmniStageConfig, StageRuntimeConfig
from vllm_omni.errors import StageConfigError
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import Error, NewRequest, Outbox, Result, StageEngine, Stop, Stream, StreamChunk
from vllm_omni.stage.engines.fake import FakeStageEngine
from vllm_omni.stage.engines.function import FunctionStageEngine

_PR_SET_TIMERSLACK = 29  # linux/prctl.h
_NUM_WAITS = 50_000


def double(request: StageRequest, sources: Mapping[int, StageOutput]) -> Any:
    """A stage function: twice the count of its first source."""
    if request.options.get("wrong"):
        return "no dict"
    count = sources[0].data["count"]
    return {"text": f"{2 * count}", "count": 2 * count, "ones": torch.ones(count)}


def function_engine(name: str) -> FunctionStageEngine:
    stage = OmniStageConfig(stage_id=1, engine_type="function", function=f"{__name__}.{name}")
    return stage.kind.make_engine("", Outbox())


@pytest.fixture
def start() -> Iterator[Callable[[StageEngine], StageEngine]]:
    running: list[tuple[StageEngine, threading.Thread]] = []

    def start(engine: StageEngine) -> StageEngine:
        engine.start()
        thread = threading.Thread(target=engine.run)
        thread.start()
        running.append((engine, thread))
        return engine

    yield start
    for engine, thread in running:
        engine.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def take(outbox: Outbox, count: int) -> list[Any]:
    items: list[Any] = []
    while len(items) < count:
        items += outbox.take_all()
    return items


def test_a_function_stage(start: Callable[[StageEngine], StageEngine]) -> None:
    engine = start(function_engine("double"))
    sources = {0: StageOutput(request_id="", stage_id=0, data={"count": 3})}
    for request_id, options in (("good", {}), ("bad", {"wrong": True}), ("lost", {}), ("better", {})):
        request = StageRequest(request_id=request_id, options=options)
        engine.inbox.put(NewRequest(request, sources={} if request_id == "lost" else sources))
    good, bad, lost, better = take(engine.outbox, 4)
    assert isinstance(good, Result) and isinstance(better, Result)
    assert good.output.data == {"count": 6} and good.output.completions[0].text == "6"
    assert good.output.tensors["ones"].shape == (3,)
    assert isinstance(bad, Error) and "must return a dict, not str" in bad.error
    assert isinstance(lost, Error) and lost.error.startswith("KeyError") and "double" in lost.traceback


def test_a_function_that_does_not_exist() -> None:
    with pytest.raises(StageConfigError, match="did you mean 'double'"):
        function_engine("duoble").start()


def test_an_abort_removes_a_waiting_request(start: Callable[[StageEngine], StageEngine]) -> None:
    engine = FakeStageEngine(Outbox(), 0, "a")
    for request_id in ("first", "aborted", "last"):
        engine.inbox.put(NewRequest(StageRequest(request_id=request_id, prompt="p")))
    engine.abort("aborted")
    engine.abort("unknown")
    start(engine)
    assert [item.request_id for item in take(engine.outbox, 2)] == ["first", "last"]


def test_the_first_windows_of_streams_pass_other_work(start: Callable[[StageEngine], StageEngine]) -> None:
    engine = function_engine("double")
    sources = {0: StageOutput(request_id="", stage_id=0, data={"count": 1})}
    for request_id, is_last in (("whole", True), ("a", False)):
        engine.inbox.put(NewRequest(StageRequest(request_id=request_id), sources=sources, is_last=is_last))
    engine.inbox.put(StreamChunk("a", sources=sources, is_last=True))
    engine.inbox.put(NewRequest(StageRequest(request_id="b"), sources=sources, is_last=False))
    start(engine)
    items = take(engine.outbox, 4)
    assert [(item.request_id, type(item)) for item in items] == [
        ("a", Stream), ("b", Stream), ("whole", Result), ("a", Result)
    ]  # fmt: skip


def test_requests_with_a_lower_priority_value_come_first(start: Callable[[StageEngine], StageEngine]) -> None:
    engine = function_engine("double")
    sources = {0: StageOutput(request_id="", stage_id=0, data={"count": 1})}
    for priority in (0, 2, -1):
        engine.inbox.put(NewRequest(StageRequest(request_id=f"{priority}", priority=priority), sources=sources))
    start(engine)
    assert [item.request_id for item in take(engine.outbox, 3)] == ["-1", "0", "2"]


def test_an_input_that_ends_without_a_window_makes_no_call(start: Callable[[StageEngine], StageEngine]) -> None:
    engine = function_engine("double")
    sources = {0: StageOutput(request_id="", stage_id=0, data={"count": 1})}
    engine.inbox.put(NewRequest(StageRequest(request_id="a"), sources=sources, is_last=False))
    engine.inbox.put(StreamChunk("a", is_last=True))
    first, last = take(start(engine).outbox, 2)
    assert isinstance(first, Stream) and first.output.data == {"count": 2}
    assert isinstance(last, Result) and not (last.output.data or last.output.completions)


def double_all(requests: list[StageRequest], sources: list[Mapping[int, StageOutput]]) -> list[Any]:
    """A batch function: twice the count of each; -1 is wrong, and no call may have 0 with others."""
    counts = [source[0].data["count"] for source in sources]
    if 0 in counts and len(counts) > 1:
        raise RuntimeError("one of them is wrong")
    return [ValueError("negative") if count < 0 else {"count": 2 * count, "of": len(counts)} for count in counts]


def test_a_batch_has_one_window_of_each_request(start: Callable[[StageEngine], StageEngine]) -> None:
    runtime = StageRuntimeConfig(max_batch_size=4)
    stage = OmniStageConfig(
        stage_id=1, engine_type="function", batch_function=f"{__name__}.double_all", runtime=runtime
    )
    engine = stage.kind.make_engine("", Outbox())
    assert engine.capacity == 8

    def window(count: int) -> dict[int, StageOutput]:
        return {0: StageOutput(request_id="", stage_id=0, data={"count": count})}

    for name, count in (("a", 1), ("b", -1), ("c", 3)):
        engine.inbox.put(NewRequest(StageRequest(request_id=name), sources=window(count), is_last=name != "a"))
    engine.inbox.put(StreamChunk("a", sources=window(0), is_last=True))
    engine.inbox.put(NewRequest(StageRequest(request_id="d"), sources=window(4)))
    engine.inbox.put(NewRequest(StageRequest(request_id="e"), sources=window(5)))
    items = {(item.request_id, type(item)): item for item in take(start(engine).outbox, 6)}
    assert items["a", Stream].output.data == {"count": 2, "of": 4}
    assert items["b", Error].error == "ValueError: negative"
    assert items["c", Result].output.data["of"] == items["d", Result].output.data["of"] == 4
    assert items["a", Result].output.data == {"count": 0, "of": 1}, "a batch that raises is computed one by one"
    assert items["e", Result].output.data == {"count": 10, "of": 1}


def test_a_short_wait_for_an_item_ends() -> None:
    """Also where its thread is interrupted for longer than it is to wait, as some of so many are."""
    inbox = FakeStageEngine(Outbox(), 0, "writer").inbox

    def wait() -> None:
        # The kernel is to wake it in time: its timers are 50 us late by default.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
        for _ in range(_NUM_WAITS):
            inbox.put(Stop())
            inbox.get()
            with suppress(queue.Empty):
                inbox.get(timeout=1e-9)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    is_waiting = thread.is_alive()
    inbox.put(Stop())
    assert not is_waiting
