# SPDX-License-Identifier: Apache-2.0
"""Function stages that are classes: the order of calls, several requests at once, and every way in which one ends."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import torch

from tests.stage.running_engine import PATIENCE, RunningEngine
from vllm_omni.config.stage import OmniStageConfig, StageRuntimeConfig
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.function_stage import FunctionStage, load_function_stage
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.placement.shared_cores import SharedCores
from vllm_omni.placement.spec import StagePlacement
from vllm_omni.stage.engines.base import AbortRequest, Error, NewRequest, Outbox, Result, Stream, StreamChunk
from vllm_omni.stage.engines.function import FunctionStageEngine
from vllm_omni.stage.watchdog import StepTimer


class Settings(msgspec.Struct):
    mark: str = "."
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2.0)] = 1.0


@dataclass
class Talk:
    name: str
    mark: str
    texts: list[str] = field(default_factory=list)


class Recorder(FunctionStage):
    """Records its calls. `on_window` is what a window does, besides."""

    parameters = Settings

    def __init__(self, stage: OmniStageConfig, model: str) -> None:
        super().__init__(stage, model)
        self.calls: list[tuple[str, str]] = []
        self.on_window: Callable[[Talk, str], Any] = lambda talk, text: {"text": text + talk.mark}

    def start(self) -> None:
        self.calls.append(("start", self.model))

    def begin(self, request: StageRequest, parameters: Settings) -> Talk:
        self.calls.append(("begin", request.request_id))
        if request.options.get("fails"):
            raise ValueError("cannot begin")
        return Talk(request.request_id, parameters.mark)

    def window(self, state: Talk, sources: Mapping[int, StageOutput]) -> Any:
        text = sources[0].completions[0].text if sources else "no source"
        self.calls.append((text, state.name))
        state.texts.append(text)
        return self.on_window(state, text)

    def end(self, state: Talk) -> Any:
        self.calls.append(("end", state.name))
        return {"text": f"<{len(state.texts)}>", "all": state.texts}

    def abort(self, state: Talk) -> None:
        self.calls.append(("abort", state.name))

    def calls_of(self, name: str) -> list[str]:
        return [what for what, who in self.calls if who == name]


STAGE = OmniStageConfig(stage_id=1, engine_type="function", function=f"{__name__}.Recorder")


def make_stage(num_threads: int = 1) -> tuple[FunctionStageEngine, Recorder]:
    function = Recorder(STAGE, "model")
    engine = FunctionStageEngine(Outbox(), function, num_threads)
    engine.start()
    return engine, function


@pytest.fixture
def run() -> Iterator[Callable[[FunctionStageEngine], RunningEngine]]:
    running: list[RunningEngine] = []

    def run(engine: FunctionStageEngine) -> RunningEngine:
        running.append(RunningEngine(engine))
        return running[-1]

    yield run
    for each in running:
        each.stop()


Run = Callable[[FunctionStageEngine], RunningEngine]


def source(text: str) -> dict[int, StageOutput]:
    return {0: StageOutput(request_id="", stage_id=0, completions=[Completion(text=text)])}


def new(name: str, text: str, is_last: bool = False, priority: int = 0, **fields: Any) -> NewRequest:
    request = StageRequest(request_id=name, priority=priority, **fields)
    return NewRequest(request, sources=source(text), is_last=is_last)


def more(name: str, text: str, is_last: bool = False) -> StreamChunk:
    return StreamChunk(name, sources=source(text), is_last=is_last)


def text_of(items: list[Any]) -> str:
    assert isinstance(items[-1], Result) and all(isinstance(item, Stream) for item in items[:-1])
    return "".join(item.output.completions[0].text for item in items if item.output.completions)


def test_one_request(run: Run) -> None:
    engine, function = make_stage()
    running = run(engine)
    running.put(new("r", "one", parameters={"mark": "!"}), more("r", "two"), more("r", "three", is_last=True))
    assert text_of(running.wait_for("r", 5)) == "one!two!three!<3>"
    assert running.output("r").data == {"all": ["one", "two", "three"]}
    assert function.calls[0] == ("start", "model")
    assert function.calls_of("r") == ["begin", "one", "two", "three", "end"]
    running.wait_asleep()
    assert running.counter.batch_sizes == [1, 1, 1]


def test_a_stage_without_sources_has_one_window(run: Run) -> None:
    running = run(make_stage()[0])
    running.put(NewRequest(StageRequest(request_id="r")))
    assert text_of(running.wait_for("r", 3)) == "no source.<1>"


def test_an_input_may_end_without_a_further_window(run: Run) -> None:
    engine, function = make_stage()
    running = run(engine)
    running.put(new("r", "one"), StreamChunk("r", is_last=True))
    assert text_of(running.wait_for("r", 3)) == "one.<1>"
    assert function.calls_of("r") == ["begin", "one", "end"]


def test_first_windows_pass_later_ones_and_whole_inputs(run: Run) -> None:
    engine, function = make_stage()
    engine.inbox.put(new("whole", "w", is_last=True))
    engine.inbox.put(new("a", "a1"))
    engine.inbox.put(more("a", "a2", is_last=True))
    engine.inbox.put(new("b", "b1", priority=1))
    engine.inbox.put(new("c", "c1", priority=-1))
    items = [engine.inbox.get() for _ in range(5)]
    for item in items:
        engine._read(item)
    running = run(engine)
    running.wait_for("a", 4)
    running.wait_for("whole", 3)
    windows = [what for what, _ in function.calls if what not in ("start", "begin", "end")]
    assert windows == ["c1", "a1", "w", "a2", "b1"], "by priority, then first windows"


def test_of_later_windows_the_one_that_is_due_first_is_first(run: Run) -> None:
    """A client that has ten seconds to play lets one pass that has one, and a request that nobody listens to."""
    stage = msgspec.structs.replace(STAGE, sample_rate=100)
    function = Recorder(stage, "model")
    function.on_window = lambda talk, text: {"audio": torch.zeros(100 * len(text))}
    engine = FunctionStageEngine(Outbox(), function, 1)
    for name, first in (("a", "a" * 10), ("b", "b")):
        request = StageRequest(request_id=name)
        engine._read(NewRequest(request, sources=source(first), is_last=False, streams_output=True))
        engine._read(more(name, f"{name}2", is_last=True))
    engine._read(new("whole", "w" * 5, is_last=True))
    running = run(engine)
    for name in ("a", "b", "whole"):
        running.wait_for(name, 3)
    windows = [what for what, _ in function.calls if what not in ("begin", "end")]
    assert windows == ["a" * 10, "b", "b2", "w" * 5, "a2"]


def test_requests_run_at_the_same_time_and_the_windows_of_one_in_order(run: Run) -> None:
    engine, function = make_stage(num_threads=3)
    barrier = threading.Barrier(3)

    def meet(talk: Talk, text: str) -> dict[str, str]:
        barrier.wait(PATIENCE)  # It opens only if windows of three requests are computed at the same time.
        return {"text": text}

    function.on_window = meet
    running = run(engine)
    for name in "abc":
        running.put(new(name, "1"), *[more(name, f"{i}", is_last=i == 4) for i in (2, 3, 4)])
    assert [text_of(running.wait_for(name, 6)) for name in "abc"] == ["1234<4>"] * 3
    running.wait_asleep()
    assert len(running.counter.batch_sizes) == 12


def test_the_cores_of_calls_in_threads_are_used_until_all_of_them_have_returned(run: Run, tmp_path: Path) -> None:
    engine, function = make_stage(num_threads=2)
    engine.cores = SharedCores(tmp_path, 0, StagePlacement(num_threads=3, max_threads=3))
    started, go_on, returned = threading.Barrier(3), threading.Event(), threading.Event()

    def wait(talk: Talk, text: str) -> dict[str, str]:
        started.wait(PATIENCE)
        go_on.wait(PATIENCE)
        return {"text": text}

    function.on_window = wait
    running = run(engine)
    running.counter.after[2] = returned.set
    running.put(new("a", "1", is_last=True), new("b", "1", is_last=True))
    started.wait(PATIENCE)
    assert (tmp_path / "threads").read_bytes()[0] == 3
    go_on.set()
    assert returned.wait(PATIENCE)
    running.wait_asleep()
    assert (tmp_path / "threads").read_bytes()[0] == 0


def test_an_abort_stops_a_generator_between_two_pieces(run: Run) -> None:
    engine, function = make_stage()
    aborted, closed = threading.Event(), threading.Event()

    def endless(talk: Talk, text: str) -> Iterator[dict[str, str]]:
        try:
            yield {"text": "first"}
            assert aborted.wait(PATIENCE)
            while True:
                yield {"text": "later"}
        finally:
            closed.set()

    function.on_window = endless
    running = run(engine)
    running.put(new("r", "one"), more("r", "two"))
    running.wait_for("r")
    running.put(AbortRequest("r"), AbortRequest("unknown"))
    assert running.inbox.wait_asleep()  # The abort was read.
    aborted.set()
    assert closed.wait(PATIENCE)
    function.on_window = lambda talk, text: {"text": text}
    running.put(new("next", "n", is_last=True))
    assert text_of(running.wait_for("next", 3)) == "n<1>"
    assert function.calls_of("r") == ["begin", "one", "abort"]
    (piece,) = running.items["r"]
    assert isinstance(piece, Stream) and piece.output.completions[0].text == "first"


def test_an_abort_releases_a_request_that_waits_for_input(run: Run) -> None:
    engine, function = make_stage()
    running = run(engine)
    running.put(new("r", "one"))
    running.wait_for("r")
    running.put(AbortRequest("r"), more("r", "two", is_last=True))
    running.put(new("next", "n", is_last=True))
    running.wait_for("next", 3)
    running.wait_asleep()
    assert function.calls_of("r") == ["begin", "one", "abort"]


def test_an_aborted_request_that_has_not_begun_is_dropped(run: Run) -> None:
    engine, function = make_stage()
    engine._read(new("r", "one", is_last=True))
    engine._read(AbortRequest("r"))
    running = run(engine)
    running.put(new("next", "n", is_last=True))
    running.wait_for("next", 3)
    assert function.calls_of("r") == []


def test_an_error_fails_only_its_request(run: Run) -> None:
    engine, function = make_stage(num_threads=2)

    def fail(talk: Talk, text: str) -> Any:
        match text:
            case "wrong type":
                return "no dict"
            case "invalid":
                raise InvalidRequestError("no sound", talk.name)
            case "late":
                return (1 / (2 - i) and {"text": "x"} for i in range(3))
        return {"text": text}

    function.on_window = fail
    running = run(engine)
    running.put(
        new("a", "wrong type"), new("b", "invalid"), new("c", "late", is_last=True),
        new("d", "x", options={"fails": True}), new("e", "x", parameters={"speed": 9.0}),
        new("good", "g", is_last=True),
    )  # fmt: skip
    assert text_of(running.wait_for("good", 3)) == "g<1>"
    for name, num_items, words, calls in (
        ("a", 1, "Recorder must return or yield dicts, not str", ["begin", "wrong type", "abort"]),
        ("b", 1, "no sound", ["begin", "invalid", "abort"]),
        ("c", 3, "ZeroDivisionError", ["begin", "late", "abort"]),
        ("d", 1, "ValueError: cannot begin", ["begin"]),
        ("e", 1, "<= 2.0", []),
    ):
        error = running.wait_for(name, num_items)[-1]
        assert isinstance(error, Error) and words in error.error and error.invalid == (name == "b")
        assert name != "b" or error.error == "no sound", "a client reads it: no class of Python's"
        assert function.calls_of(name) == calls
    running.put(more("a", "too late"), more("good", "too late"))
    running.wait_asleep()
    assert all(isinstance(items[-1], Error | Result) for items in running.items.values())


def test_a_failing_end_or_abort_releases_what_it_can(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, function = make_stage()

    def fail(state: Talk) -> Any:
        raise RuntimeError("cannot end")

    monkeypatch.setattr(function, "end", fail)
    running = run(engine)
    running.put(new("r", "one", is_last=True))
    assert "cannot end" in running.wait_for("r", 2)[-1].error  # type: ignore[union-attr]
    assert function.calls_of("r") == ["begin", "one", "abort"]
    monkeypatch.setattr(function, "abort", fail)
    running.put(new("s", "one", is_last=True), new("t", "one"))
    assert "cannot end" in running.wait_for("s", 2)[-1].error  # type: ignore[union-attr]
    assert isinstance(running.wait_for("t")[0], Stream)


def test_a_stop_ends_generators_and_releases_every_request() -> None:
    engine, function = make_stage(num_threads=2)
    may_go_on = threading.Event()

    def endless(talk: Talk, text: str) -> Iterator[dict[str, str]]:
        while True:
            yield {"text": text}
            assert may_go_on.wait(PATIENCE)

    function.on_window = endless
    running = RunningEngine(engine)
    running.put(new("a", "one"), new("b", "one"), new("waiting", "one"))
    running.wait_for("a")
    running.wait_for("b")
    engine.stop()
    may_go_on.set()
    running.stop()
    assert function.calls_of("a") == function.calls_of("b") == ["begin", "one", "abort"]
    assert function.calls_of("waiting") == []


def test_an_error_that_is_no_exception_ends_the_engine() -> None:
    engine, function = make_stage()

    def exit_thread(talk: Talk, text: str) -> Any:
        raise SystemExit("the library ends the process")

    function.on_window = exit_thread
    engine.inbox.put(new("r", "one"))
    with pytest.raises(SystemExit, match="the library"):
        engine.run()


def test_each_thread_has_a_time_limit(run: Run) -> None:
    engine, function = make_stage(num_threads=2)

    class RecordingTimer(StepTimer):
        restarts = 0

        def restart(self) -> None:
            self.restarts += 1
            super().restart()

    timers: list[RecordingTimer] = []

    def make_timer() -> StepTimer:
        timers.append(RecordingTimer())
        return timers[-1]

    engine.set_timers(make_timer)
    barrier = threading.Barrier(3)

    def meet(talk: Talk, text: str) -> Iterator[dict[str, str]]:
        barrier.wait(PATIENCE)
        yield {"text": text}
        barrier.wait(PATIENCE)

    function.on_window = meet
    running = run(engine)
    running.put(new("a", "one"), new("b", "one"))
    barrier.wait(PATIENCE)
    assert len(timers) == 3 and len({timer.thread_id for timer in timers[1:]}) == 2
    running.wait_for("a")
    running.wait_for("b")
    assert [timer.restarts for timer in timers[1:]] == [2, 2]  # when the call starts, and with each piece
    barrier.wait(PATIENCE)


def test_a_stage_configuration_names_the_class() -> None:
    engine = STAGE.kind.make_engine("model", Outbox())
    assert isinstance(engine, FunctionStageEngine) and engine.capacity == 32
    four = msgspec.structs.replace(STAGE, runtime=StageRuntimeConfig(max_batch_size=4))
    assert four.kind.make_engine("model", Outbox()).capacity == 128


def test_any_other_class_is_refused() -> None:
    stage = msgspec.structs.replace(STAGE, function=f"{__name__}.Talk")
    with pytest.raises(StageConfigError, match="Talk does not extend FunctionStage"):
        load_function_stage(stage)
