# SPDX-License-Identifier: Apache-2.0
"""Large payloads are copied on another thread, and messages to a stage keep their order."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch
import zmq

from tests.orchestrator.pipelines import TIMEOUT_S
from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, StageInstance
from vllm_omni.distributed.connectors import PayloadReceiver
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import (
    AbortMessage,
    InputMessage,
    PeerDownMessage,
    SharedMemoryRef,
    SubmitMessage,
    recv_at_stage,
)
from vllm_omni.distributed.run_dir import RunDir
from vllm_omni.errors import PipelineClosedError
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.launch.stage_handle import LARGE_BYTES, OmniStage, StageHandle
from vllm_omni.outputs import StageOutput


class HeldThread(Executor):
    """Starts a copy when the test says so, on a thread of its own."""

    def __init__(self) -> None:
        self.held: deque[Callable[[], None]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.held.append(run)
        return future

    def run(self) -> None:
        thread = threading.Thread(target=self.held.popleft())
        thread.start()
        thread.join()


class Stage:
    """The handle of a stage, and the socket of its process."""

    def __init__(self, run_dir: RunDir, context: zmq.Context) -> None:
        self.copy_thread = HeldThread()
        self.commands: deque[Callable[[], None]] = deque()
        self.errors: list[tuple[str, str]] = []
        self.run_dir = run_dir
        self._payloads = PayloadReceiver(run_dir.path)
        instance = StageInstance(instance_id=0, replica=0, stage=OmniStageConfig(stage_id=0, engine_type="fake"))
        connector = ConnectorConfig(name="SharedMemoryConnector", extra={"shm_threshold_bytes": 65536})
        self.handle = OmniStage(
            instance,
            run_dir,
            context,
            connector,
            Credit(8, 1 << 30),
            self.copy_thread,
            self.commands.append,
            self._on_error,
        )
        self._socket = context.socket(zmq.PULL)
        self.start()

    def _on_error(self, stage: StageHandle, request_id: str, error: Exception) -> None:
        assert stage is self.handle
        self.errors.append((request_id, type(error).__name__))

    def start(self) -> None:
        """A process takes requests."""
        address = f"ipc://{self.run_dir.path}/stage.{self.handle.epoch}"
        self._socket.bind(address)
        self.handle.on_ready(address, "")

    def submit(self, request_id: str, num_bytes: int = 8) -> None:
        sound = torch.arange(num_bytes // 4, dtype=torch.float32)
        given = StageOutput(request_id=request_id, stage_id=-1, tensors={"audio": sound})
        request = StageRequest(request_id=request_id, input_override=given)
        self.handle.submit(request, 1, sources=[], targets=[], is_final=True, streams=False)

    def copy(self) -> None:
        """The next copy runs; the orchestrator's thread is notified of its end."""
        self.copy_thread.run()
        while self.commands:
            self.commands.popleft()()

    def received(self, count: int) -> list[Any]:
        """The messages that were sent, which are so many."""
        messages = []
        while len(messages) < count:
            assert self._socket.poll(TIMEOUT_S * 1000), messages
            received = recv_at_stage(self._socket)
            if received is not None:
                message, frames = received
                if isinstance(message, SubmitMessage):
                    assert self._is_whole(self._payloads.get(StageRequest, message.payload, frames))
                messages.append(message)
        return messages

    @staticmethod
    def _is_whole(request: StageRequest) -> bool:
        assert request.input_override is not None
        sound = request.input_override.tensors["audio"]
        return sound.equal(torch.arange(len(sound), dtype=torch.float32))


@pytest.fixture
def stage() -> Iterator[Stage]:
    run_dir, context = RunDir(), zmq.Context()
    try:
        yield Stage(run_dir, context)
    finally:
        context.destroy(linger=0)
        run_dir.remove()


def names(messages: list[Any]) -> list[Any]:
    return [(type(each), each.request_ids if isinstance(each, AbortMessage) else each.request_id) for each in messages]


def test_a_small_request_is_sent_at_once(stage: Stage) -> None:
    stage.submit("small", LARGE_BYTES // 2)
    assert names(stage.received(1)) == [(SubmitMessage, "small")]
    assert not stage.copy_thread.held and not stage.commands


def test_what_follows_a_copy_waits_in_order(stage: Stage) -> None:
    stage.submit("before")
    stage.submit("large", LARGE_BYTES)
    stage.submit("small")
    stage.handle.extend("large", StageInput(additional_information={"text": "more"}), is_last=True)
    stage.handle.abort(["large"])
    stage.submit("next", 2 * LARGE_BYTES)
    stage.handle.abort(["next"])
    assert len(stage.copy_thread.held) == 1, "one payload at a time"
    assert names(stage.received(1)) == [(SubmitMessage, "before")]
    stage.copy()
    first = stage.received(4)
    assert isinstance(first[0].payload, SharedMemoryRef)
    stage.copy()
    assert names(first + stage.received(2)) == [
        (SubmitMessage, "large"),
        (SubmitMessage, "small"),
        (InputMessage, "large"),
        (AbortMessage, ["large"]),
        (SubmitMessage, "next"),
        (AbortMessage, ["next"]),
    ]
    stage.handle.abort(["after"])
    assert names(stage.received(1)) == [(AbortMessage, ["after"])]


def test_credit_is_spent_before_the_copy(stage: Stage) -> None:
    for i in range(8):
        stage.submit(str(i), LARGE_BYTES)
    assert stage.handle.credit.is_spent


def test_a_payload_that_cannot_be_put_fails_its_request(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    put, errors = stage.handle._peer.put_buffers, iter([OSError("no")])

    def refuse_once(buffers: Any) -> Any:
        for error in errors:
            raise error
        return put(buffers)

    monkeypatch.setattr(stage.handle._peer, "put_buffers", refuse_once)
    for request_id in ("large", "next"):
        stage.submit(request_id, LARGE_BYTES)
    stage.handle.abort(["other"])
    spent = stage.handle.credit._num_bytes
    stage.copy()
    assert stage.errors == [("large", "OSError")]
    assert stage.handle.credit._num_bytes < spent
    stage.copy()
    assert names(stage.received(2)) == [(SubmitMessage, "next"), (AbortMessage, ["other"])]


def test_nothing_of_a_dead_process_reaches_the_next(stage: Stage) -> None:
    stage.submit("large", LARGE_BYTES)
    stage.handle.abort(["large"])
    copying = threading.Thread(target=stage.copy_thread.held.popleft())
    copying.start()
    stage.handle.on_death("killed")  # It waits for the copy.
    copying.join()
    assert not list(stage.run_dir.path.glob("payload-*"))
    stage.start()
    while stage.commands:
        stage.commands.popleft()()
    stage.submit("small")
    assert names(stage.received(1)) == [(SubmitMessage, "small")]


def test_flush_sends_what_waits(stage: Stage) -> None:
    stage.submit("large", LARGE_BYTES)
    stage.handle.send(PeerDownMessage(instance_id=1, epoch=0, finished=[]))
    copying = threading.Thread(target=stage.copy_thread.held.popleft())
    copying.start()
    stage.handle.flush()
    copying.join()
    assert [type(message) for message in stage.received(2)] == [SubmitMessage, PeerDownMessage]


def test_a_copy_may_end_after_the_pipeline(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(command: Callable[[], None]) -> None:
        raise PipelineClosedError("closed")

    stage.handle._outgoing._command = refuse
    stage.submit("large", LARGE_BYTES)
    stage.copy_thread.run()
    assert not caplog.records
    stage.handle.flush()
    assert names(stage.received(1)) == [(SubmitMessage, "large")]
