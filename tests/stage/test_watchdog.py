# SPDX-License-Identifier: Apache-2.0
"""A step that hangs ends its stage's process like a crash; steps with progress and idle stages do not."""

import ctypes
import faulthandler
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.engine.running import greedy, random_prompts
from tests.orchestrator.pipelines import (
    FAR,
    TRIANGLE,
    Caller,
    fake_stage,
    function_stage,
    make_config,
    open_orchestrator,
    texts,
)
from tests.orchestrator.test_failure import wait_until
from tests.stage.conftest import Ended
from tests.stage.running_engine import PATIENCE, RunningEngine
from tests.stage.test_llm_engine import whole
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.inputs import StageRequest
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import NewRequest, Outbox, RequestItem
from vllm_omni.stage.engines.diffusion import DiffusionStageEngine
from vllm_omni.stage.engines.fake import FakeStageEngine
from vllm_omni.stage.engines.function import FunctionStageEngine, PlainFunction
from vllm_omni.stage.watchdog import COMPILE_S, INTAKE, STEP, StepTimer, Watchdog


def hang(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """A stage function that hangs on the prompt `hangs`.

    Without faulthandler's timer: after a pause of the machine it could be the first to end the process.
    """
    faulthandler.dump_traceback_later = lambda *args, **options: None
    while request.prompt == "hangs":
        time.sleep(FAR)
    return {"text": sources[0].completions[0].text + ">b"}


class HangingIntakeEngine(FakeStageEngine):
    """Hangs in the intake of the prompt `hangs`."""

    def _take_in(self, item: RequestItem) -> None:
        while isinstance(item, NewRequest) and item.request.prompt == "hangs":
            assert self.ended.wait(PATIENCE)  # type: ignore[attr-defined]
            self.stop()
            return
        super()._take_in(item)


def hold_the_lock(request: StageRequest, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
    """A stage function that hangs in C code and holds Python's lock on the prompt `hang`."""
    if request.prompt == "hang":
        ctypes.PyDLL(None).sleep(3600)
    return {"text": "done"}


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[PipelineConfig], Caller]]:
    opened: list[Orchestrator] = []

    def start(config: PipelineConfig) -> Caller:
        opened.append(open_orchestrator(config))
        opened[-1].wait_until_started()
        return Caller(opened[-1], config)

    yield start
    for orchestrator in opened:
        orchestrator.close()


def limited(stage: dict[str, Any], limit_s: float) -> dict[str, Any]:
    return stage | {"runtime": {"step_timeout_s": limit_s}}


def test_requests_fail_and_the_stage_restarts(start: Callable[[PipelineConfig], Caller]) -> None:
    a, _, c = TRIANGLE
    b = function_stage(1, "b", hang, (0,))
    stages = limited(a, 3600.0), limited(b, 1.0), limited(c, 0)
    caller = start(make_config(*stages, restart={"backoff_s": 0.01}))
    for _ in range(2):
        caller.submit("good")
        assert texts(caller.wait_one()) == ["good>a", "good>a+good>a>b>c"]
        num_restarts = caller.orchestrator.health()[1].num_restarts
        hanging = caller.submit("hangs")
        wait_until(lambda n=num_restarts: caller.orchestrator.health()[1].num_restarts > n)
        expected = "stage 1 (b): a step took longer than 1 s (runtime.step_timeout_s)"
        assert caller.orchestrator.health()[1].last_death == expected
        caller.orchestrator.abort([hanging])  # It is tried again: the first step of the next process has more time.
        assert caller.wait_one().request_id == hanging


@pytest.mark.slow
def test_code_that_holds_the_lock(start: Callable[[PipelineConfig], Caller]) -> None:
    stage = function_stage(0, "f", hold_the_lock, output="text")
    caller = start(make_config(limited(stage, 1.0), restart={"backoff_s": 0.01}))
    for _ in range(2):
        caller.submit("good")
        assert texts(caller.wait_one()) == ["done"]
        num_restarts = caller.orchestrator.health()[0].num_restarts
        hanging = caller.submit("hang")
        wait_until(lambda n=num_restarts: caller.orchestrator.health()[0].num_restarts > n)
        assert caller.orchestrator.health()[0].last_death == "it exited with status 1"
        caller.orchestrator.abort([hanging])
        assert caller.wait_one().request_id == hanging


def test_without_a_limit_there_is_no_watchdog(start: Callable[[PipelineConfig], Caller]) -> None:
    caller = start(make_config(limited(fake_stage(0, "a", output="text"), 0)))
    caller.submit("good")
    assert texts(caller.wait_one()) == ["good>a"]


ends_in_a_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@ends_in_a_thread
def test_the_log_has_the_stack_of_the_engine_that_hangs(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    """The first step may take longer, and so may any step of an engine that always compiles."""
    watchdog = Watchdog(ended)
    timer = watchdog.watch("stage 1 (b)", 0.2, always_compiles=False)
    compiling = watchdog.watch("stage 2 (c)", 0.2, always_compiles=True)
    watchdog.start()

    def hang_here() -> None:
        with timer:
            assert ended.happened.wait(PATIENCE)

    with timer:
        assert timer.limit_s == 0.2 + COMPILE_S
    for _ in range(2):
        with compiling:
            assert compiling.limit_s == 0.2 + COMPILE_S
    assert not ended.happened.is_set()
    engine = threading.Thread(target=hang_here)
    engine.start()
    engine.join()
    assert ended.messages == ["stage 1 (b): a step took longer than 0.2 s (runtime.step_timeout_s)"]
    error = capsys.readouterr().err
    assert "in hang_here" in error and "in test_the_log" not in error


@ends_in_a_thread
def test_an_intake_that_hangs(ended: Ended) -> None:
    watchdog = Watchdog(ended)
    engine = HangingIntakeEngine(Outbox(), 0, "a")
    engine.ended = ended.happened  # type: ignore[attr-defined]
    engine.step_timer = watchdog.watch("a", 0.2, always_compiles=False)
    watchdog.watch("b", 0.5, always_compiles=True)  # Otherwise faulthandler would end the tests.
    watchdog.start()
    for prompt in ("good", "hangs"):
        engine.inbox.put(NewRequest(StageRequest(request_id=prompt, prompt=prompt)))
    engine.run()
    assert ended.messages == ["a: taking in a request took longer than 0.2 s (runtime.step_timeout_s)"]


@ends_in_a_thread
def test_while_no_step_runs_the_watchdog_sleeps_without_a_timeout(ended: Ended) -> None:
    watchdog = Watchdog(ended)
    timer = watchdog.watch("a", 0.5, always_compiles=False)
    watchdog.watch("b", 0.5, always_compiles=True)  # Otherwise faulthandler would end the tests.
    watchdog.start()
    with timer:
        pass
    with timer:  # This one has the short limit; the watchdog wakes up for its deadline.
        pass
    for _ in range(PATIENCE * 100):
        if watchdog.wakes_at == math.inf and not watchdog._is_due.is_set():
            break
        watchdog._thread.join(0.01)
    assert watchdog.wakes_at == math.inf and not ended.messages
    with timer:  # The watchdog still runs.
        assert ended.happened.wait(PATIENCE)


def test_the_first_step_of_a_shape_has_more_time() -> None:
    timer = StepTimer("a", 10.0, wake_before=lambda deadline: None)
    for shape, limit_s in ((1, COMPILE_S + 10), (1, 10.0), (2, COMPILE_S + 10), (2, 10.0), (1, 10.0)):
        with timer:
            timer.set_shape(shape)
            assert timer.limit_s == limit_s, shape
    for limit_s in (COMPILE_S + 10, 10.0):
        with timer.of(INTAKE):
            assert (timer.what, timer.limit_s) == (INTAKE, limit_s)


def test_work_inside_a_step_has_a_limit_of_its_own() -> None:
    timer = StepTimer("a", 10.0, wake_before=lambda deadline: None)
    with timer:
        with timer.of(INTAKE):
            assert timer.what == INTAKE
        assert timer.what == STEP and timer.deadline < math.inf
    assert timer.deadline == math.inf


class RecordingTimer(StepTimer):
    """Records the deadlines of steps."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []
        super().__init__("a", 1000.0, wake_before=self.deadlines.append)


def test_a_vllm_stage_times_its_steps(ar: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = RecordingTimer()
    monkeypatch.setattr(ar.engine, "step_timer", timer)
    ar.put(whole("a", random_prompts(9)[0], greedy(5)))
    ar.finish("a")
    assert len(timer.deadlines) >= len(ar.counter.batch_sizes) == 5
    assert timer.deadline == math.inf


def test_a_diffusion_stage_times_its_steps() -> None:
    class Executor:
        has_work = True

        def step(self) -> tuple[list[Any], int]:
            assert engine.step_timer.deadline < math.inf
            engine.stop()
            return [], 1

        def close(self) -> None: ...

    engine = DiffusionStageEngine(Outbox(), 0, "", DiTConfig(compile=True), None)
    assert engine.always_compiles
    engine._executor = Executor()  # type: ignore[assignment]
    engine.step_timer = timer = RecordingTimer()
    engine.run()
    engine.close()
    assert len(timer.deadlines) == 1 and timer.deadline == math.inf


def test_each_piece_of_a_generator_has_the_limit_of_a_step() -> None:
    stage = OmniStageConfig(stage_id=0, engine_type="function")
    two_pieces = PlainFunction(stage, "", lambda request, sources: iter([{"text": "a"}, {"text": "b"}]))
    engine = FunctionStageEngine(Outbox(), two_pieces)
    engine.step_timer = timer = RecordingTimer()
    running = RunningEngine(engine)
    running.put(NewRequest(StageRequest(request_id="r")))
    running.wait_for("r", 3)
    running.stop()
    assert len(timer.deadlines) == 4 and timer.deadline == math.inf, "the intake, the step, and two pieces"
