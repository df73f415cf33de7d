# SPDX-License-Identifier: Apache-2.0
"""The shell of a stage with real sockets and an engine that only records its inbox."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.stage.conftest import Ended
from tests.stage.running_engine import PATIENCE
from tests.stage.test_watchdog import ends_in_a_thread
from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, StageInstance, WindowConfig
from vllm_omni.distributed.connectors import PayloadSender, make_connector
from vllm_omni.distributed.messages import (
    ORCHESTRATOR,
    AbortMessage,
    AliveMessage,
    DataMessage,
    ErrorMessage,
    Frames,
    InputMessage,
    Message,
    PayloadRef,
    PeerDownMessage,
    PeerUpMessage,
    ReadyMessage,
    ResultMessage,
    ShutdownMessage,
    StatsMessage,
    SubmitMessage,
    recv_at_orchestrator,
    send,
)
from vllm_omni.distributed.run_dir import orchestrator_address
from vllm_omni.inputs import ReplyParsers, SpokenText, StageInput, StageRequest
from vllm_omni.metrics.recorder import StageRecorder
from vllm_omni.metrics.stats import COMPLETED, StageMetrics, StageStats
from vllm_omni.metrics.tracing import StageTracer
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.payloads import AdditionalInformationPayload
from vllm_omni.stage import request_handler, shell
from vllm_omni.stage.engines.base import (
    AbortRequest,
    NewRequest,
    Outbox,
    RequestItem,
    Result,
    StageEngine,
    Started,
    Stop,
)
from vllm_omni.stage.shell import StageShell
from vllm_omni.stage.spec import SourceSpec, StageSpec
from vllm_omni.stage.watchdog import COMPILE_S, StepTimer, Watchdog


class RecordingEngine(StageEngine):
    def start(self) -> None: ...

    def step(self) -> None: ...

    def has_work(self) -> bool:
        return False

    def _take_in(self, item: RequestItem) -> None: ...

    def next(self) -> NewRequest | AbortRequest | Stop:
        return self.inbox.get(timeout=PATIENCE)


class Joiner(StageInputProcessor):
    """Joins the texts of its sources; has no input for the engine on "nothing", and raises on "fail"."""

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
        words = [output.completions[0].text for _, output in sorted(sources.items())]
        if "fail" in words:
            raise ValueError("fails")
        return None if "nothing" in words else StageInput(additional_information={"words": words})


CONNECTOR = ConnectorConfig(name="SharedMemoryConnector", extra={"shm_threshold_bytes": 512})


class RecordingTracer(StageTracer):
    """Records the outcomes of spans, by request id."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def request_ended(
        self, request_id: str, trace_headers: Mapping[str, str], metrics: StageMetrics, outcome: str = COMPLETED
    ) -> None:
        self.outcomes[request_id] = outcome


class Peers:
    """The orchestrator and the sources of stage 2, which reads stages 0 and 1."""

    def __init__(
        self, run_dir: Path, timer: StepTimer | None = None, processor: StageInputProcessor | None = None
    ) -> None:
        self.run_dir = run_dir
        self.outbox = Outbox()
        self.engine = RecordingEngine(self.outbox)
        self.parent_end, lifeline = socket.socketpair()
        spec = StageSpec(
            instance=StageInstance(instance_id=2, replica=0, stage=OmniStageConfig(stage_id=2)),
            sources={source: SourceSpec(stage_id=source, window=WindowConfig()) for source in (0, 1)},
            orchestrator=PeerUpMessage(instance_id=ORCHESTRATOR, epoch=0, address=orchestrator_address(run_dir)),
            connector=CONNECTOR,
            max_inflight=8,
            max_queued=4,
            run_dir=str(run_dir),
        )
        self._context = zmq.Context()
        self.orchestrator = self._context.socket(zmq.PULL)
        self.orchestrator.setsockopt(zmq.RCVTIMEO, PATIENCE * 1000)
        self.orchestrator.bind(orchestrator_address(run_dir))
        self.is_lost = threading.Event()
        self.tracer = RecordingTracer()
        stage = StageShell(spec, lifeline, self.is_lost.set, self.outbox, StageRecorder(2, "joiner"), self.tracer)
        stage.attach(self.engine, processor or Joiner(None), timer)
        self.thread = threading.Thread(target=stage.run)
        self.thread.start()
        self.socket = self._context.socket(zmq.PUSH)
        self._payloads = PayloadSender(make_connector(CONNECTOR, run_dir, ORCHESTRATOR, 2))
        self.stats: list[StageStats] = []

    def start(self) -> None:
        self.outbox.put(Started())
        ready = self.receive()
        assert isinstance(ready, ReadyMessage)
        self.socket.connect(ready.address)

    def submit(self, request_id: str, number: int, is_complete: bool = True, **fields: Any) -> None:
        request = StageRequest(request_id=request_id, is_complete=is_complete, **fields)
        payload, frames = self._payloads.put(request)
        message = SubmitMessage(
            request_id=request_id,
            number=number,
            sources=[0, 1],
            targets=[],
            is_final=True,
            streams=False,
            payload=payload,
        )
        self.send(message, frames)

    def data(self, request_id: str, number: int, source: int, text: str) -> None:
        output = StageOutput(request_id=request_id, stage_id=source, completions=[Completion(text=text)])
        payload, frames = self._payloads.put(output)
        self.send(self.data_message(request_id, number, source, payload), frames)

    def input(self, request_id: str, text: str, is_last: bool) -> None:
        payload, frames = self._payloads.put(AdditionalInformationPayload.from_dict({"text": text}))
        message = InputMessage(request_id=request_id, num_ready_tokens=7, is_last=is_last, payload=payload)
        self.send(message, frames)

    def start_requests(self, request_ids: str) -> None:
        """Submits a request for each letter, with its whole input; returns when the engine has them."""
        for number, request_id in enumerate(request_ids, start=1):
            self.submit(request_id, number)
            self.data(request_id, number, 0, "a")
            self.data(request_id, number, 1, "b")
            self.engine.next()

    def data_message(self, request_id: str, number: int, source: int, payload: PayloadRef) -> DataMessage:
        return DataMessage(
            request_id=request_id, number=number, source=source, sequence=0, is_last=True, sent=0.0, payload=payload
        )

    def send(self, message: Message, frames: Frames = ()) -> None:
        send(self.socket, message, frames, sender=ORCHESTRATOR)

    def receive(self) -> Message:
        """The next message to the orchestrator; snapshots before it are in `stats`."""
        while self.orchestrator.poll(PATIENCE * 1000):
            received = recv_at_orchestrator(self.orchestrator)
            assert received is not None
            if not isinstance(received[0], StatsMessage):
                return received[0]
            self.stats.append(received[0].stats)
        raise AssertionError("no message")

    def close(self) -> None:
        """Ends the shell as the end of its parent does; it may have been shut down before."""
        self.parent_end.close()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self._context.destroy(linger=0)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    with contextlib.closing(Peers(tmp_path)) as peers:
        peers.start()
        yield peers


def test_an_idle_stage_reports_that_it_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its start on; and it still works."""
    monkeypatch.setattr(shell, "HEARTBEAT_S", 0.01)
    with contextlib.closing(Peers(tmp_path)) as peers:
        assert not peers.orchestrator.poll(100)
        peers.start()
        assert [type(peers.receive()) for _ in range(3)] == [AliveMessage] * 3
        peers.start_requests("r")


def words(item: NewRequest | AbortRequest | Stop) -> list[str]:
    assert isinstance(item, NewRequest) and item.stage_input is not None
    return item.stage_input.additional_information["words"]


def test_a_request_starts_when_all_sources_have_sent_output(peers: Peers) -> None:
    peers.submit("r", 1)
    peers.submit("s", 2)
    peers.data("r", 1, 1, "b")
    peers.data("s", 2, 0, "c")
    peers.data("s", 2, 1, "d")
    assert words(peers.engine.next()) == ["c", "d"]
    peers.data("r", 1, 0, "a")
    assert words(peers.engine.next()) == ["a", "b"]


class FakeReply:
    """All of a reply is spoken."""

    def __init__(self, request: StageRequest) -> None: ...

    def select(self, piece: StageOutput) -> StageOutput:
        return piece


class Parsers:
    """Replaces those of vLLM: loads when the test says so, or raises."""

    def __init__(self) -> None:
        self.num_loads = 0
        self.may_end = threading.Event()
        self.error: BaseException | None = None

    def load(self, parsers: ReplyParsers) -> None:
        self.num_loads += 1
        assert self.may_end.wait(PATIENCE)
        if self.error is not None:
            raise self.error


SPOKEN = SpokenText(parsers=ReplyParsers(tokenizer="t"))


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> Parsers:
    parsers = Parsers()
    monkeypatch.setattr(request_handler, "load_parsers", parsers.load)
    monkeypatch.setattr(request_handler, "SpokenReply", FakeReply)
    return parsers


def send_all(peers: Peers, request_id: str, number: int, **fields: Any) -> None:
    peers.submit(request_id, number, **fields)
    peers.data(request_id, number, 0, request_id)
    peers.data(request_id, number, 1, "b")


def test_only_requests_that_need_parsers_wait_for_them(peers: Peers, parsers: Parsers) -> None:
    send_all(peers, "r", 1, spoken_text=SPOKEN)
    send_all(peers, "gone", 2, spoken_text=SPOKEN)
    peers.send(AbortMessage(request_ids=["gone"]))
    send_all(peers, "plain", 3)  # It is read after the abort, which the end of the parsers' thread could overtake.
    assert words(peers.engine.next()) == ["plain", "b"]
    parsers.may_end.set()
    assert words(peers.engine.next()) == ["r", "b"]
    send_all(peers, "s", 4, spoken_text=SPOKEN)
    assert words(peers.engine.next()) == ["s", "b"] and parsers.num_loads == 1


def test_parsers_that_cannot_be_loaded_fail_their_requests(peers: Peers, parsers: Parsers, tmp_path: Path) -> None:
    parsers.error = SystemExit("a plugin exits")
    peers.submit("r", 1, spoken_text=SPOKEN)
    peers.data("r", 1, 0, "a" * 1000)
    parsers.may_end.set()
    failed = peers.receive()
    assert isinstance(failed, ErrorMessage) and failed.request_id == "r"
    assert failed.error == "SystemExit: a plugin exits"
    parsers.error = None
    send_all(peers, "s", 2, spoken_text=SPOKEN)
    assert words(peers.engine.next()) == ["s", "b"] and parsers.num_loads == 2
    assert not list(tmp_path.glob("peer*"))


def test_early_data_waits_for_its_request(peers: Peers) -> None:
    peers.data("r", 1, 0, "a")
    peers.data("r", 1, 1, "b" * 1000)
    peers.submit("r", 1)
    assert words(peers.engine.next()) == ["a", "b" * 1000]


def test_more_input_follows_the_request_into_the_engine(peers: Peers, tmp_path: Path) -> None:
    """That of an unknown request, with its payload, is dropped."""
    peers.submit("r", 1, is_complete=False)
    peers.input("r", "one", is_last=False)
    peers.input("gone", "x" * 1000, is_last=True)
    peers.data("r", 1, 0, "a")
    peers.data("r", 1, 1, "b")
    first = peers.engine.next()
    assert words(first) == ["a", "b"] and isinstance(first, NewRequest) and not first.is_last
    peers.input("r", "y" * 1000, is_last=True)
    chunks: list[Any] = [peers.engine.next(), peers.engine.next()]
    texts = [chunk.stage_input.additional_information["text"] for chunk in chunks]
    assert texts == ["one", "y" * 1000]
    assert [(chunk.stage_input.num_ready_tokens, chunk.is_last) for chunk in chunks] == [(7, False), (7, True)]
    assert not list(tmp_path.glob("peer*"))


def test_late_data_is_dropped(peers: Peers, tmp_path: Path) -> None:
    peers.submit("r", 1)
    peers.send(AbortMessage(request_ids=["r"]))
    peers.data("r", 1, 0, "a" * 1000)
    peers.data("r", 1, 1, "b")
    peers.submit("s", 2)
    peers.data("s", 2, 0, "c")
    peers.data("s", 2, 1, "d")
    assert words(peers.engine.next()) == ["c", "d"]
    assert not list(tmp_path.glob("peer*"))  # the late payload was removed


def test_an_abort_drops_early_data(peers: Peers, tmp_path: Path) -> None:
    peers.data("r", 1, 0, "a" * 1000)
    peers.send(AbortMessage(request_ids=["r"]))
    peers.submit("s", 2)
    peers.data("s", 2, 0, "c")
    peers.data("s", 2, 1, "d")
    assert words(peers.engine.next()) == ["c", "d"]
    assert not list(tmp_path.glob("peer*"))


def test_results_of_aborted_requests_are_not_sent(peers: Peers) -> None:
    peers.start_requests("rs")
    peers.send(AbortMessage(request_ids=["r"]))
    assert isinstance(peers.engine.next(), AbortRequest)
    for request_id in "rs":
        peers.outbox.put(Result(request_id, StageOutput(request_id=request_id, stage_id=2), num_output_tokens=3))
    message = peers.receive()
    assert isinstance(message, ResultMessage)
    assert (message.request_id, message.metrics.num_output_tokens) == ("s", 3)
    assert message.metrics.finished >= message.metrics.arrival > 0


def test_a_request_without_input_for_the_engine_has_an_empty_result(peers: Peers) -> None:
    peers.submit("r", 1)
    peers.data("r", 1, 0, "nothing")
    peers.data("r", 1, 1, "b")
    message = peers.receive()
    assert isinstance(message, ResultMessage) and message.request_id == "r"


def test_an_exception_of_the_input_processor_fails_its_request(peers: Peers) -> None:
    peers.submit("r", 1)
    peers.data("r", 1, 0, "fail")
    peers.data("r", 1, 1, "b")
    message = peers.receive()
    assert isinstance(message, ErrorMessage) and message.error == "ValueError: fails"
    assert not message.invalid and "Joiner" not in message.error and "process" in message.traceback


def test_a_payload_that_cannot_be_read_fails_its_request(peers: Peers) -> None:
    peers.submit("r", 1)
    payload, frames = PayloadSender(make_connector(CONNECTOR, peers.run_dir, 0, 2)).put([1, 2, 3])
    peers.send(peers.data_message("r", 1, 0, payload), frames)
    message = peers.receive()
    assert isinstance(message, ErrorMessage) and message.request_id == "r"


def test_a_snapshot_precedes_the_result_that_makes_the_stage_idle(peers: Peers) -> None:
    peers.start_requests("rs")
    with peers.outbox.batch():
        for request_id in "rs":
            peers.outbox.put(Result(request_id, StageOutput(request_id=request_id, stage_id=2)))
    assert isinstance(peers.receive(), ResultMessage)
    assert isinstance(peers.receive(), ResultMessage)
    stats = peers.stats[-1]
    assert (stats.num_enqueued, stats.num_completed, stats.num_running, stats.queue_depth) == (2, 2, 0, 0)


def test_a_request_that_is_reported_lost_has_a_metric_and_a_span(peers: Peers) -> None:
    peers.submit("r", 1)
    peers.data("r", 1, 0, "a")
    peers.send(PeerDownMessage(instance_id=1, epoch=0, finished=["r"]))
    message = peers.receive()
    assert isinstance(message, ErrorMessage) and (message.request_id, message.dead_instance) == ("r", 1)
    assert peers.stats[-1].failures == {"StageDeadError": 1}
    assert peers.tracer.outcomes == {"r": "StageDeadError"}


@ends_in_a_thread
def test_code_of_a_model_that_hangs_on_this_thread_is_overdue(tmp_path: Path, ended: Ended) -> None:
    class Hanging(Joiner):
        def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
            assert request.request_id == "a" or ended.happened.wait(PATIENCE)
            return super().process(request, sources)

    watchdog = Watchdog(ended)
    timer = watchdog.watch("joiner", 0.2, always_compiles=False)
    watchdog.watch("other", 0.5, always_compiles=True)  # Otherwise faulthandler would end the tests.
    watchdog.start()
    with contextlib.closing(Peers(tmp_path, timer, Hanging(None))) as peers:
        peers.start()
        peers.start_requests("ab")  # The first may take longer, and the orchestrator is told.
        alive = peers.receive()
        assert isinstance(alive, AliveMessage) and alive.more_s == COMPILE_S
    assert ended.messages == ["joiner: the stage input processor took longer than 0.2 s (runtime.step_timeout_s)"]


def test_shutdown_stops_the_engine(peers: Peers) -> None:
    peers.send(ShutdownMessage())
    assert isinstance(peers.engine.next(), Stop)
    peers.thread.join()
    assert not peers.is_lost.is_set()


def test_it_ends_with_its_parent(peers: Peers) -> None:
    peers.parent_end.close()
    peers.thread.join()
    assert peers.is_lost.is_set()
