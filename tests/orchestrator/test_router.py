# SPDX-License-Identifier: Apache-2.0
"""`RequestRouter` with fake stages: admission, submits, outputs, failures, restarts, and one terminal event each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.clock import Clock
from tests.orchestrator.pipelines import TRIANGLE, fake_stage, make_config
from vllm_omni.distributed.connectors import (
    Connector,
    InlineConnector,
    PayloadReceiver,
    PayloadSender,
    SharedMemoryConnector,
)
from vllm_omni.distributed.messages import (
    ErrorMessage,
    InlineRef,
    OutputMessage,
    PeerDownMessage,
    ResultMessage,
    TextsMessage,
)
from vllm_omni.errors import (
    InvalidRequestError,
    RequestAbortedError,
    RequestTimeoutError,
    StageCrashError,
    StageDeadError,
    StageExecutionError,
)
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent, OmniEvent
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.kinds.function import Fake
from vllm_omni.launch.fake import FakeStage
from vllm_omni.metrics.observer import PipelineObserver, RequestSummary
from vllm_omni.metrics.stats import StageMetrics, StageState
from vllm_omni.orchestrator import router as router_module
from vllm_omni.orchestrator.admission import Admission
from vllm_omni.orchestrator.isolated_retry import LIMIT_S, IsolatedRetry
from vllm_omni.orchestrator.request import PipelineRequest
from vllm_omni.orchestrator.router import RequestRouter
from vllm_omni.outputs import Completion, StageOutput

A, B, C = 0, 1, 2  # a outputs text; b reads a; c reads a and b and outputs audio


class RecordingObserver(PipelineObserver):
    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[RequestSummary] = []

    def request_started(self, request_id: str, modalities: list[str], trace_headers: Any = None) -> dict[str, str]:
        self.started.append(request_id)
        return {"traceparent": request_id}

    def request_ended(self, summary: RequestSummary) -> None:
        self.ended.append(summary)


class Pipeline:
    """A router, its fake stages, and the events of its requests by request id."""

    def __init__(
        self, *stages: dict[str, Any], max_inflight: int = 4, max_queued: int = 2, run_dir: Path = Path()
    ) -> None:
        self.config = make_config(*(stages or TRIANGLE), max_inflight=max_inflight)
        self.log: list[tuple[str, Any]] = []
        self.stages = {i: FakeStage(replica, self.log, max_queued) for i, replica in self.config.instances.items()}
        self.observer = RecordingObserver()
        self.admission = Admission(max_inflight, 100)
        self.router = RequestRouter(
            self.config,
            self.stages,
            self.admission,
            PayloadReceiver(run_dir),
            self.observer,
        )
        self.events: dict[str, list[OmniEvent]] = {}

    def put(
        self, request_id: str, *modalities: str, streams: bool = False, deadline: float | None = None
    ) -> PipelineRequest:
        wanted = list(modalities) or self.config.output_types
        stage_ids = self.config.stages_for(wanted)
        self.events[request_id] = []
        request = PipelineRequest(
            request_id=request_id,
            external_id=f"external-{request_id}",
            stages={i: StageRequest(request_id=request_id, modalities=wanted) for i in stage_ids},
            final_stages=[i for i in stage_ids if self.config.stages[i].final_output_type in wanted],
            on_event=self.events[request_id].append,
            streams=streams,
            timeout_s=deadline,
            arrival=0.0,
        )
        self.admission.put(request, wait=False)
        self.router.watch_deadline(request)
        return request

    def start(self, request_id: str, *modalities: str, streams: bool = False) -> None:
        self.put(request_id, *modalities, streams=streams)
        self.router.admit()

    def output(self, stage_id: int, request_id: str, text: str) -> None:
        ref, frames = as_payload(stage_id, request_id, text)
        message = OutputMessage(request_id=request_id, instance_id=stage_id, payload=ref)
        self.router.on_output(self.stages[stage_id], message, frames)

    def result(
        self,
        stage_id: int,
        request_id: str,
        text: str | None = None,
        connector: Connector | None = None,
        **sent_to: int,
    ) -> None:
        """A stage completes a request; `sent_to` has the epochs of its targets, by stage name."""
        ref, frames = (None, []) if text is None else as_payload(stage_id, request_id, text, connector)
        ids = {stage.name: i for i, stage in self.stages.items()}
        message = ResultMessage(
            request_id=request_id,
            instance_id=stage_id,
            metrics=StageMetrics(stage_id=self.stages[stage_id].stage_id, name=self.stages[stage_id].name),
            sent_to={ids[name]: epoch for name, epoch in sent_to.items()},
            payload=ref,
        )
        self.router.on_result(self.stages[stage_id], message, frames)

    def error(self, stage_id: int, request_id: str, **fields: Any) -> None:
        message = ErrorMessage(request_id=request_id, instance_id=stage_id, error="RuntimeError: why", **fields)
        self.router.on_error(self.stages[stage_id], message)

    def complete(self, request_id: str) -> None:
        self.result(A, request_id, "text", b=0, c=0)
        self.result(B, request_id, c=0)
        self.result(C, request_id, "audio")

    def kill(self, stage_id: int, state: StageState = StageState.RESTARTING) -> None:
        self.stages[stage_id].on_death("it was killed by SIGKILL")
        self.stages[stage_id].state = state
        self.router.on_stage_down(self.stages[stage_id])

    def wait_for_node(self, stage_id: int) -> None:
        self.stages[stage_id].waits_for = "a node"
        self.router.on_stage_waits(self.stages[stage_id])

    def restart(self, stage_id: int) -> None:
        self.stages[stage_id].on_ready("", "")
        self.router.on_stage_up(self.stages[stage_id])

    def end(self, request_id: str) -> OmniEvent:
        """The terminal event: the only one, and the last."""
        *others, end = self.events[request_id]
        assert end.is_terminal and not any(event.is_terminal for event in others)
        assert [event.sequence for event in self.events[request_id]] == list(range(len(others) + 1))
        assert {event.request_id for event in self.events[request_id]} == {f"external-{request_id}"}
        assert [summary.request_id for summary in self.observer.ended].count(request_id) == 1
        return end

    def failure(self, request_id: str) -> Exception:
        end = self.end(request_id)
        assert isinstance(end, ErrorEvent), end
        return end.error

    def is_lost(self, request_id: str, stage_id: int) -> bool:
        """Whether a stage's death has taken the request, which is to be tried again."""
        assert self.events[request_id] == []
        return any(
            q.stage_id == stage_id and r.request_id == again(request_id)
            for q in self.isolated_retries
            for r in q.waiting
        )

    @property
    def isolated_retries(self) -> list[IsolatedRetry]:
        return self.router._isolated_retries

    def submitted(self, stage_id: int) -> list[str]:
        return list(self.stages[stage_id].submits)


def again(request_id: str, number: int = 1) -> str:
    """The id of its second try, or of a later one."""
    return f"{request_id}.retry{number}"


def as_payload(
    stage_id: int, request_id: str, text: str, connector: Connector | None = None
) -> tuple[Any, list[memoryview]]:
    output = StageOutput(
        request_id=request_id,
        stage_id=stage_id,
        completions=[Completion(text=text)],
        tensors={"audio": torch.zeros(4)} if stage_id == C else {},
    )
    ref, frames = PayloadSender(connector or InlineConnector()).put(output)
    return ref, [memoryview(frame) for frame in frames]


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


# Admission and submits.


def test_a_request_is_submitted_to_the_last_stage_first(pipeline: Pipeline) -> None:
    pipeline.start("r")
    assert pipeline.log == [("c", ("r", 1)), ("b", ("r", 1)), ("a", ("r", 1))]
    arguments = {i: stage.submits["r"] for i, stage in pipeline.stages.items()}
    assert arguments == {
        A: {"sources": [], "targets": [B, C], "is_final": True, "streams": False},
        B: {"sources": [A], "targets": [C], "is_final": False, "streams": False},
        C: {"sources": [A, B], "targets": [], "is_final": True, "streams": False},
    }


def test_only_stages_that_a_request_needs_get_it(pipeline: Pipeline) -> None:
    pipeline.start("r", "text", streams=True)
    assert pipeline.log == [("a", ("r", 1))]
    assert pipeline.stages[A].submits["r"] == {"sources": [], "targets": [], "is_final": True, "streams": True}
    pipeline.result(A, "r", "text")
    assert isinstance(pipeline.end("r"), CompletedEvent)


def test_stages_get_the_observer_s_trace_headers(pipeline: Pipeline) -> None:
    request = pipeline.put("r")
    pipeline.router.admit()
    assert [stage.trace_headers for stage in request.stages.values()] == [{"traceparent": "r"}] * 3


def test_requests_are_admitted_in_order_up_to_max_inflight() -> None:
    pipeline = Pipeline(max_inflight=2, max_queued=100)
    for request_id in "abcd":
        pipeline.put(request_id)
    pipeline.router.admit()
    assert pipeline.submitted(A) == ["a", "b"]
    pipeline.complete("b")
    pipeline.router.admit()
    assert pipeline.submitted(A) == ["a", "b", "c"]
    assert [number for name, (_, number) in pipeline.log if name == "a"] == [1, 2, 3]


def test_a_first_stage_without_credit_stops_admission(pipeline: Pipeline) -> None:
    for request_id in "rst":
        pipeline.start(request_id)
    assert pipeline.submitted(A) == ["r", "s"] and pipeline.observer.started == ["r", "s"]
    pipeline.stages[A].credit.refund(1, 0)
    pipeline.router.admit()
    assert pipeline.submitted(A) == ["r", "s", "t"]


def test_other_stages_credit_does_not_stop_admission(pipeline: Pipeline) -> None:
    pipeline.stages[C].credit.spend(100, 0)
    pipeline.start("r")
    assert pipeline.submitted(C) == ["r"]


def test_a_request_that_cannot_be_sent_fails_and_stops_being_submitted(pipeline: Pipeline) -> None:
    pipeline.stages[B].submit_error = OSError("no space left on device")
    pipeline.start("r")
    error = pipeline.failure("r")
    assert isinstance(error, StageExecutionError) and error.stage_id == B
    assert "the request's data could not be sent: OSError: no space left on device" in str(error)
    assert pipeline.submitted(A) == [] and pipeline.stages[C].aborted == ["r"]


def test_a_request_whose_data_cannot_be_sent_later_fails(pipeline: Pipeline) -> None:
    pipeline.start("r")
    for request_id in ("r", "r", "an ended request"):
        pipeline.router.on_send_error(pipeline.stages[A], request_id, OSError("no space left on device"))
    error = pipeline.failure("r")
    assert isinstance(error, StageExecutionError) and error.stage_id == A
    assert pipeline.stages[A].aborted == pipeline.stages[C].aborted == ["r"]


def test_more_input_follows_the_request_once_its_stage_has_it(pipeline: Pipeline) -> None:
    pipeline.kill(A)
    request = pipeline.put("r")
    pipeline.router.extend(request, A, StageInput(prompt="one"), False)
    pipeline.router.admit()
    pipeline.router.extend(request, A, StageInput(prompt="two"), False)
    assert pipeline.submitted(C) == ["r"] and pipeline.submitted(A) == []
    pipeline.restart(A)
    pipeline.router.extend(request, A, StageInput(prompt="three"), True)
    sent = [entry for name, entry in pipeline.log if name == "a" and isinstance(entry, tuple)]
    assert sent == [("r", 1), ("r", "one", False), ("r", "two", False), ("r", "three", True)]
    pipeline.router.abort(["r"])
    pipeline.router.extend(request, A, StageInput(prompt="late"), True)
    assert pipeline.log[-1][1] != ("r", "late", True)


def test_more_input_that_cannot_be_sent_fails_the_request(pipeline: Pipeline) -> None:
    request = pipeline.put("r")
    pipeline.router.admit()
    pipeline.stages[A].submit_error = OSError("no space left on device")
    pipeline.router.extend(request, A, StageInput(prompt="one"), False)
    error = pipeline.failure("r")
    assert isinstance(error, StageExecutionError) and error.stage_id == A


# Outputs.


def test_a_request_completes_with_the_last_result(pipeline: Pipeline) -> None:
    pipeline.start("r")
    pipeline.result(C, "r", "audio")
    pipeline.result(A, "r", "text", b=0, c=0)
    assert pipeline.events["r"] == []
    pipeline.result(B, "r", c=0)
    end = pipeline.end("r")
    assert isinstance(end, CompletedEvent)
    assert [output.final_output_type for output in end.outputs] == ["text", "audio"]
    assert end.outputs[0].outputs[0].text == "text"
    assert [stage.stage_id for stage in pipeline.observer.ended[0].stages] == [A, B, C]
    assert pipeline.stages[A].aborted == []


def test_segments_are_events_before_the_terminal_one(pipeline: Pipeline) -> None:
    pipeline.start("r", "text", streams=True)
    for text in ("x", "y"):
        pipeline.output(A, "r", text)
    pipeline.result(A, "r", "z")
    end = pipeline.end("r")
    segments = [event for event in pipeline.events["r"] if isinstance(event, ARSegmentEvent)]
    assert [(event.text, event.is_last) for event in segments] == [("x", False), ("y", False), ("z", True)]
    assert isinstance(end, CompletedEvent) and end.outputs[0].outputs[0].text == "xyz"


def test_texts_that_arrive_together_are_events_of_their_requests(pipeline: Pipeline) -> None:
    pipeline.start("r", "text", streams=True)
    pipeline.start("s", "text", streams=True)
    outputs = [
        StageOutput(request_id=request_id, stage_id=A, completions=[Completion(text=request_id)], is_last=False)
        for request_id in ("r", "ended", "s", "r")
    ]
    ref, frames = PayloadSender(InlineConnector()).put(outputs)
    message = TextsMessage(instance_id=A, payload=ref)
    pipeline.router.on_texts(pipeline.stages[A], message, [memoryview(frame) for frame in frames])
    texts = {name: [(e.text, e.is_last) for e in events] for name, events in pipeline.events.items()}  # type: ignore[attr-defined]
    assert texts == {"r": [("r", False)] * 2, "s": [("s", False)]}


def test_late_and_duplicate_messages_are_dropped(tmp_path: Path) -> None:
    pipeline = Pipeline(run_dir=tmp_path)
    pipeline.start("r", streams=True)
    pipeline.complete("r")
    num_events = len(pipeline.events["r"])
    shared = SharedMemoryConnector(tmp_path, "payload", 1)
    pipeline.result(C, "r", "again", connector=shared)
    pipeline.output(A, "r", "late")
    pipeline.error(B, "r")
    pipeline.router.abort(["r"])
    assert len(pipeline.events["r"]) == num_events and isinstance(pipeline.end("r"), CompletedEvent)
    assert (tmp_path / "pool-payload-0").exists() and not (tmp_path / "payload-0").exists()
    assert pipeline.stages[A].aborted == []


def test_an_output_that_cannot_be_read_fails_the_request(pipeline: Pipeline) -> None:
    pipeline.start("r")
    message = OutputMessage(request_id="r", instance_id=A, payload=InlineRef(sizes=[3]))
    pipeline.router.on_output(pipeline.stages[A], message, [memoryview(b"\xc1xx")])
    error = pipeline.failure("r")
    assert isinstance(error, StageExecutionError) and "the output of stage 0 (a) could not be read" in str(error)


# Failures.


@pytest.mark.parametrize(("invalid", "kind"), [(False, StageExecutionError), (True, InvalidRequestError)])
def test_an_error_of_a_stage_ends_only_its_request(pipeline: Pipeline, invalid: bool, kind: type[Exception]) -> None:
    for request_id in "rs":
        pipeline.start(request_id)
    pipeline.error(B, "r", invalid=invalid, traceback="where")
    error = pipeline.failure("r")
    assert type(error) is kind and "stage 1 (b): RuntimeError: why" in str(error)
    assert error.stage_traceback == "where"  # type: ignore[attr-defined]
    assert [stage.aborted for stage in pipeline.stages.values()] == [["r"]] * 3
    assert pipeline.observer.ended[0].failed_stage == "b" and pipeline.events["s"] == []
    pipeline.complete("s")
    assert isinstance(pipeline.end("s"), CompletedEvent)


def test_a_stage_reports_the_death_of_another(pipeline: Pipeline) -> None:
    pipeline.start("r")
    pipeline.stages[B].death = "it was killed"
    pipeline.error(C, "r", dead_instance=B)
    assert pipeline.is_lost("r", B)


def test_aborts_of_running_waiting_and_unknown_requests() -> None:
    pipeline = Pipeline(max_inflight=1)
    pipeline.start("running")
    pipeline.put("waiting")
    pipeline.router.abort(["waiting", "running", "unknown", "running"])
    for request_id in ("running", "waiting"):
        assert isinstance(pipeline.failure(request_id), RequestAbortedError)
    assert pipeline.stages[C].aborted == ["running"] and pipeline.admission.peek() is None
    assert pipeline.observer.started == ["running", "waiting"]


def test_deadlines_end_running_and_waiting_requests() -> None:
    pipeline = Pipeline(max_inflight=1)
    assert pipeline.router.due is None
    pipeline.put("running", deadline=20.0)
    pipeline.put("waiting", deadline=10.0)
    pipeline.router.admit()
    assert pipeline.router.due == 10.0
    pipeline.router.end_overdue(9.9)
    assert pipeline.events == {"running": [], "waiting": []}
    pipeline.router.end_overdue(10.0)
    assert isinstance(pipeline.failure("waiting"), RequestTimeoutError) and pipeline.events["running"] == []
    assert pipeline.router.due == 20.0
    pipeline.router.end_overdue(30.0)
    assert isinstance(pipeline.failure("running"), RequestTimeoutError) and pipeline.router.due is None
    assert pipeline.stages[A].aborted == ["running"]


def test_the_deadline_of_an_ended_request_has_no_effect(pipeline: Pipeline) -> None:
    pipeline.put("r", deadline=10.0)
    pipeline.router.admit()
    pipeline.complete("r")
    pipeline.router.end_overdue(10.0)
    assert isinstance(pipeline.end("r"), CompletedEvent) and pipeline.router.due is None


def test_closing_ends_all_requests_and_admits_none() -> None:
    pipeline = Pipeline(max_inflight=1)
    pipeline.start("running")
    pipeline.put("waiting")
    pipeline.router.end_all()
    pipeline.router.admit()
    for request_id in ("running", "waiting"):
        error = pipeline.failure(request_id)
        assert isinstance(error, RequestAbortedError) and "the pipeline was closed" in str(error)
    assert pipeline.submitted(A) == ["running"]


# Stages that die and restart.


def test_requests_whose_input_died_start_again_and_the_others_wait(pipeline: Pipeline) -> None:
    for request_id in ("sent", "unsent"):
        pipeline.start(request_id)
    pipeline.result(A, "sent", "text", b=0, c=0)
    pipeline.log.clear()
    pipeline.kill(B)
    assert pipeline.is_lost("sent", B)
    assert pipeline.events["unsent"] == [] and pipeline.observer.ended == []
    down = PeerDownMessage(instance_id=B, epoch=0, finished=[])
    assert pipeline.log == [("a", down), ("c", down)]
    pipeline.log.clear()
    pipeline.restart(B)
    a, b, c = (pipeline.stages[i].peer_up("") for i in (A, B, C))
    assert pipeline.log == [("b", a), ("b", c), ("b", ("unsent", 2)), ("a", b), ("c", b)]
    assert b.epoch == 1
    pipeline.result(A, "unsent", "text", b=1, c=0)
    pipeline.result(B, "unsent", c=0)
    pipeline.result(C, "unsent", "audio")
    assert isinstance(pipeline.end("unsent"), CompletedEvent)


def test_the_first_stage_s_death_takes_all_that_it_had(pipeline: Pipeline) -> None:
    for request_id in "rs":
        pipeline.start(request_id)
    pipeline.result(A, "s", "text", b=0, c=0)
    pipeline.log.clear()
    pipeline.kill(A)
    assert pipeline.is_lost("r", A)
    assert ("b", PeerDownMessage(instance_id=A, epoch=0, finished=["s"])) in pipeline.log
    pipeline.result(B, "s", c=0)
    pipeline.result(C, "s", "audio")
    assert isinstance(pipeline.end("s"), CompletedEvent)


def test_requests_wait_for_a_restarting_stage_in_order() -> None:
    pipeline = Pipeline(max_queued=100)
    pipeline.kill(C)
    for request_id in "rst":
        pipeline.start(request_id)
    assert pipeline.submitted(A) == ["r", "s", "t"] and pipeline.submitted(C) == []
    pipeline.router.abort(["s"])
    pipeline.log.clear()
    pipeline.restart(C)
    assert [entry for name, entry in pipeline.log if name == "c" and isinstance(entry, tuple)] == [("r", 1), ("t", 3)]


def test_output_kept_for_a_restarting_target_dies_with_its_stage(pipeline: Pipeline) -> None:
    pipeline.kill(C)
    pipeline.start("r")
    pipeline.result(A, "r", "text", b=0)
    pipeline.result(B, "r")
    assert pipeline.events["r"] == []
    pipeline.kill(B)
    assert pipeline.is_lost("r", B)


def test_output_for_a_process_that_has_died_is_made_again(pipeline: Pipeline) -> None:
    pipeline.start("r")
    pipeline.kill(B)
    pipeline.restart(B)
    pipeline.result(A, "r", "text", b=0, c=0)
    assert pipeline.is_lost("r", B)


def test_a_dead_stage_fails_its_requests_immediately(pipeline: Pipeline) -> None:
    pipeline.start("r")
    pipeline.start("text", "text")
    pipeline.kill(C, StageState.DEAD)
    assert isinstance(pipeline.failure("r"), StageDeadError)
    pipeline.stages[A].credit.reset()
    pipeline.start("s")
    assert isinstance(pipeline.failure("s"), StageDeadError) and "s" not in pipeline.submitted(A)
    pipeline.result(A, "text", "text")
    assert isinstance(pipeline.end("text"), CompletedEvent)


# Requests that are tried again.


def lose(pipeline: Pipeline, *request_ids: str) -> None:
    """Stage b dies with these requests, and works again."""
    for request_id in request_ids:
        pipeline.stages[A].credit.reset()
        pipeline.start(request_id)
        pipeline.result(A, request_id, "text", b=pipeline.stages[B].epoch, c=0)
    for stage in pipeline.stages.values():
        stage.credit.reset()
    pipeline.kill(B)
    pipeline.restart(B)
    pipeline.router.admit()


def complete_again(pipeline: Pipeline, request_id: str) -> None:
    pipeline.result(A, again(request_id), "text", b=pipeline.stages[B].epoch, c=0)
    pipeline.result(B, again(request_id), c=0)
    pipeline.result(C, again(request_id), "audio")
    assert isinstance(pipeline.end(request_id), CompletedEvent)


def test_requests_are_tried_again_one_by_one_and_new_ones_wait(pipeline: Pipeline) -> None:
    lose(pipeline, "r", "s")
    assert pipeline.submitted(B)[2:] == [again("r")]
    pipeline.start("new")
    pipeline.start("text", "text")
    assert "new" not in pipeline.submitted(A) and "text" in pipeline.submitted(A), "it does not need b"
    pipeline.result(A, "r", "late", b=0, c=0)  # about the first try
    pipeline.result(A, again("r"), "text", b=1, c=0)
    pipeline.router.admit()
    assert again("s") not in pipeline.submitted(B)
    pipeline.result(B, again("r"), c=0)  # It has left the process.
    pipeline.router.admit()
    assert pipeline.submitted(B)[2:] == [again("r"), again("s")] and "new" not in pipeline.submitted(A)
    pipeline.result(C, again("r"), "audio")
    assert isinstance(pipeline.end("r"), CompletedEvent)
    pipeline.stages[A].credit.reset()
    complete_again(pipeline, "s")
    pipeline.router.admit()
    assert "new" in pipeline.submitted(B) and pipeline.isolated_retries == []
    assert pipeline.router._retried == {}


def test_a_request_that_kills_alone_fails_for_good_and_the_others_are_served(pipeline: Pipeline) -> None:
    lose(pipeline, "good", "bad", "other")
    complete_again(pipeline, "good")
    pipeline.router.admit()
    pipeline.result(A, again("bad"), "text", b=1, c=0)
    pipeline.kill(B)
    error = pipeline.failure("bad")
    assert isinstance(error, StageCrashError) and error.stage_id == B and "while it did nothing else" in str(error)
    pipeline.router.admit()
    pipeline.restart(B)
    pipeline.router.admit()
    complete_again(pipeline, "other")


def test_requests_that_came_before_the_death_finish_first(pipeline: Pipeline) -> None:
    pipeline.start("before")
    lose(pipeline, "r")
    assert "before" in pipeline.submitted(B) and again("r") not in pipeline.submitted(B)
    pipeline.result(A, "before", "text", b=1, c=0)
    pipeline.result(B, "before", c=0)
    pipeline.router.admit()
    assert again("r") in pipeline.submitted(B)


def test_a_request_is_tried_again_once(pipeline: Pipeline) -> None:
    """Another process, in which it is not alone, dies with it: it is not known to be the cause."""
    lose(pipeline, "r")
    pipeline.result(A, again("r"), "text", b=1, c=0)
    pipeline.result(B, again("r"), c=0)
    pipeline.kill(C)
    error = pipeline.failure("r")
    assert isinstance(error, StageDeadError) and error.retry_after_s == 5.0


def lose_stream(pipeline: Pipeline, sampling_params: SamplingParams | None = None) -> None:
    """Stage b dies when the caller has "first second", and works again."""
    request = pipeline.put("r", streams=True)
    request.stages[A].sampling_params = sampling_params
    pipeline.router.admit()
    pipeline.output(A, "r", "first ")
    pipeline.result(A, "r", "second", b=0, c=0)
    pipeline.kill(B)
    pipeline.restart(B)
    pipeline.router.admit()


@pytest.mark.parametrize("sampling_params", [None, SamplingParams(temperature=0.0), SamplingParams(seed=0)])
def test_a_stream_goes_on_where_it_was(pipeline: Pipeline, sampling_params: SamplingParams | None) -> None:
    lose_stream(pipeline, sampling_params)
    pipeline.output(A, again("r"), "first se")
    pipeline.result(A, again("r"), "cond", b=1, c=0)
    pipeline.result(B, again("r"), c=0)
    pipeline.result(C, again("r"), "audio")
    end = pipeline.end("r")
    assert isinstance(end, CompletedEvent) and end.outputs[0].outputs[0].text == "first second"
    texts = [event.text for event in pipeline.events["r"] if isinstance(event, ARSegmentEvent)]
    assert texts == ["first ", "second", "audio"]


def begin_streams(pipeline: Pipeline, *request_ids: str) -> None:
    """Stage b has these requests, and their callers have a part of their output."""
    for request_id in request_ids:
        for stage in pipeline.stages.values():
            stage.credit.reset()
        pipeline.start(request_id, streams=True)
        pipeline.output(A, request_id, "first ")
        pipeline.result(A, request_id, "second", b=0, c=0)


def test_streams_are_made_again_together_and_beside_new_requests(pipeline: Pipeline) -> None:
    begin_streams(pipeline, "r", "s")
    pipeline.kill(B)
    pipeline.router.admit()
    assert pipeline.submitted(A)[2:] == [again("r"), again("s")] and pipeline.submitted(B) == ["r", "s"]
    pipeline.restart(B)
    assert pipeline.submitted(B)[2:] == [again("r"), again("s")] and pipeline.isolated_retries == []
    pipeline.stages[A].credit.reset()
    pipeline.start("new")
    assert "new" in pipeline.submitted(B)


def test_streams_that_are_lost_twice_are_made_again_alone(pipeline: Pipeline) -> None:
    begin_streams(pipeline, "bad", "good")
    for number in (1, 2):
        pipeline.kill(B)
        pipeline.router.admit()
        pipeline.restart(B)
        pipeline.router.admit()
        for request_id in ("bad", "good"):
            if again(request_id, number) in pipeline.submitted(A):
                pipeline.result(A, again(request_id, number), "first second", b=number, c=0)
    assert pipeline.submitted(B)[4:] == [again("bad", 2)]
    pipeline.kill(B)
    assert isinstance(pipeline.failure("bad"), StageCrashError)
    pipeline.restart(B)
    pipeline.router.admit()
    pipeline.result(A, again("good", 2), "first second", b=3, c=0)
    pipeline.result(B, again("good", 2), c=0)
    pipeline.result(C, again("good", 2), "audio")
    assert isinstance(pipeline.end("good"), CompletedEvent)


@pytest.mark.parametrize("state", [StageState.RESTARTING, StageState.DEAD])
def test_a_stream_goes_on_in_another_replica_at_once(state: StageState) -> None:
    pipeline = Pipeline(fake_stage(0, "a", (), "text", replicas=2))
    pipeline.start("r", streams=True)
    pipeline.output(0, "r", "first ")
    pipeline.kill(0, state)
    pipeline.router.admit()
    assert pipeline.submitted(1) == [again("r")]
    pipeline.result(1, again("r"), "first second")
    assert isinstance(pipeline.end("r"), CompletedEvent)


def test_a_stream_fails_with_the_last_replica(pipeline: Pipeline) -> None:
    begin_streams(pipeline, "r")
    pipeline.kill(B, StageState.DEAD)
    assert type(pipeline.failure("r")) is StageDeadError
    assert [stage.num_requests for stage in pipeline.stages.values()] == [0, 0, 0]


@pytest.mark.parametrize("is_early", [True, False])
def test_a_stream_fails_where_its_stage_waits_for_a_node(pipeline: Pipeline, is_early: bool) -> None:
    begin_streams(pipeline, "r")
    pipeline.kill(B)
    if not is_early:
        pipeline.router.admit()
    pipeline.wait_for_node(B)
    pipeline.router.admit()
    assert type(pipeline.failure("r")) is StageDeadError
    pipeline.restart(B)
    pipeline.stages[A].credit.reset()
    pipeline.start("next")
    assert "next" in pipeline.submitted(B)


@pytest.mark.parametrize("text", ["first other", "first second and more"])
def test_a_stream_that_is_another_one_ends(pipeline: Pipeline, text: str) -> None:
    lose_stream(pipeline)
    pipeline.result(A, again("r"), text, b=1, c=0)
    if text.startswith("first second"):
        assert pipeline.events["r"][-1].text == " and more"
    else:
        assert isinstance(pipeline.failure("r"), StageDeadError)
        pipeline.router.admit()
        assert pipeline.isolated_retries == []


def test_a_caller_that_has_a_part_of_a_random_output_gets_the_error(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "is_autoregressive", True)
    lose_stream(pipeline, SamplingParams(temperature=1.0))
    assert isinstance(pipeline.failure("r"), StageDeadError) and pipeline.isolated_retries == []


@pytest.mark.parametrize("is_running", [True, False])
def test_requests_that_are_tried_again_can_be_aborted_and_have_deadlines(pipeline: Pipeline, is_running: bool) -> None:
    pipeline.put("timed", deadline=10.0)
    pipeline.router.admit()
    pipeline.result(A, "timed", "text", b=0, c=0)
    lose(pipeline, "aborted")
    if is_running:
        assert again("timed") in pipeline.submitted(A)
        pipeline.router.abort(["aborted"])
        pipeline.router.end_overdue(10.0)
    else:
        pipeline.router.abort(["timed"])
        pipeline.router.end_all()
    assert isinstance(pipeline.failure("aborted"), RequestAbortedError)
    assert isinstance(pipeline.failure("timed"), RequestTimeoutError if is_running else RequestAbortedError)
    pipeline.router.admit()
    assert pipeline.isolated_retries == [] and [stage.num_requests for stage in pipeline.stages.values()] == [0, 0, 0]


def test_a_process_is_not_kept_for_long(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(router_module, "time", clock)
    lose(pipeline, "r", "s")
    assert pipeline.router.due == clock.now + LIMIT_S
    clock.now += LIMIT_S
    pipeline.router.admit()
    assert isinstance(pipeline.failure("s"), StageDeadError) and pipeline.isolated_retries == []
    pipeline.result(A, again("r"), "text", b=1, c=0)
    pipeline.kill(B)
    assert type(pipeline.failure("r")) is StageDeadError, "others may have been there"


def test_nothing_waits_for_a_process_that_waits_for_a_node(pipeline: Pipeline) -> None:
    for request_id in ("aborted", "r"):
        pipeline.start(request_id)
        pipeline.result(A, request_id, "text", b=0, c=0)
    pipeline.kill(B)
    pipeline.router.abort(["aborted"])
    pipeline.wait_for_node(B)
    assert isinstance(pipeline.failure("aborted"), RequestAbortedError)
    assert type(pipeline.failure("r")) is StageDeadError
    pipeline.router.admit()
    assert pipeline.isolated_retries == []


def test_a_stage_that_is_taken_for_dead_fails_those_that_wait_for_it(pipeline: Pipeline) -> None:
    lose(pipeline, "r", "s")
    pipeline.kill(B, StageState.DEAD)
    pipeline.router.admit()
    for request_id in "rs":
        error = pipeline.failure(request_id)
        assert isinstance(error, StageDeadError) and error.retry_after_s == 30.0
    pipeline.restart(B)
    pipeline.start("next")
    pipeline.result(A, "next", "text", b=2, c=0)
    pipeline.result(B, "next", c=0)
    pipeline.result(C, "next", "audio")
    assert isinstance(pipeline.end("next"), CompletedEvent)


def test_input_that_was_sent_is_sent_again(pipeline: Pipeline) -> None:
    request = pipeline.put("r")
    pipeline.router.admit()
    for part in ("one", "two"):
        pipeline.router.extend(request, A, StageInput(prompt=part), is_last=part == "two")
    pipeline.kill(A)
    pipeline.restart(A)
    pipeline.router.admit()
    parts = [entry for name, entry in pipeline.log if name == "a" and isinstance(entry, tuple) and len(entry) == 3]
    assert [entry[0] for entry in parts] == ["r", "r", again("r"), again("r")]
    assert [entry[1] for entry in parts] == ["one", "two", "one", "two"]


def test_other_replicas_take_new_requests_meanwhile() -> None:
    pipeline = Pipeline(fake_stage(0, "a", (), "text", replicas=2))
    pipeline.start("r")
    pipeline.kill(0)
    pipeline.restart(0)
    pipeline.router.admit()
    for request_id in ("s", "t"):
        pipeline.start(request_id)
    assert pipeline.submitted(0) == ["r", again("r")] and pipeline.submitted(1) == ["s", "t"]


def test_activity_counts_stages_with_input(pipeline: Pipeline) -> None:
    pipeline.start("r")
    assert pipeline.router.activity() == {"a": 1, "b": 0, "c": 0}
    pipeline.result(A, "r", "text", b=0, c=0)
    assert pipeline.router.activity() == {"a": 0, "b": 1, "c": 0}
    pipeline.result(B, "r", c=0)
    assert pipeline.router.activity() == {"a": 0, "b": 0, "c": 1}
    pipeline.result(C, "r", "audio")
    assert pipeline.router.activity() == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize(
    "end",
    [
        lambda pipeline: pipeline.error(A, "r"),
        lambda pipeline: pipeline.kill(A, StageState.DEAD),
        lambda pipeline: pipeline.router.abort(["r"]),
        lambda pipeline: pipeline.router.end_overdue(10.0),
        lambda pipeline: pipeline.complete("r"),
        lambda pipeline: pipeline.router.end_all(),
    ],
)
def test_whatever_ends_a_request_first_is_its_only_terminal_event(end: Callable[[Pipeline], None]) -> None:
    pipeline = Pipeline(fake_stage(0, "a", (), "text"), *TRIANGLE[1:])
    pipeline.put("r", streams=True, deadline=10.0)
    pipeline.router.admit()
    pipeline.output(A, "r", "first")
    end(pipeline)
    first = pipeline.end("r")
    pipeline.error(A, "r")
    pipeline.router.abort(["r"])
    pipeline.router.end_overdue(10.0)
    pipeline.complete("r")
    pipeline.kill(A)
    pipeline.router.end_all()
    assert pipeline.end("r") is first
