# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's handle of a replica of a stage, across restarts of its process, and what is sent to a process.

Encoding copies no tensor; the copy into shared memory takes a millisecond for each few megabytes, and releases the GIL.
So another thread copies the large payloads.
"""

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial

import zmq

from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, StageInstance
from vllm_omni.control import DEFAULT_WEIGHT_VERSION
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import (
    ORCHESTRATOR,
    AbortMessage,
    ControlMessage,
    Frames,
    InputMessage,
    Message,
    PayloadRef,
    PeerUpMessage,
    SubmitMessage,
)
from vllm_omni.distributed.network import Network
from vllm_omni.distributed.peers import PayloadPeer
from vllm_omni.distributed.run_dir import RunDir
from vllm_omni.errors import PipelineClosedError
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.metrics.stats import StageState
from vllm_omni.payloads import AdditionalInformationPayload

LARGE_BYTES = 1 << 20
"""Payloads from this size on are copied on the other thread: the hop costs less than the copy of so much."""

_Copy = Future[tuple[PayloadRef, Frames]]


class StageHandle(ABC):
    """What the orchestrator knows of a replica of a stage, and sends to it. Belongs to the orchestrator's thread.

    Attributes:
        epoch: Counts its processes, from 0.
        death: How its last process ended; empty if none has.
        node, node_name: The machine that it is on, and its name in messages; empty: the orchestrator's.
        credit: Limits what is sent to it, where it is a first stage.
        num_requests: Requests that were assigned to it and that it has not finished.
        heard_s: When it sent its last message, by the clock of `SilenceWatch`.
        more_s: What it may be silent for after that in addition to its `step_timeout_s`.
        weight_version: Of the weights of its process; empty: not known.
        waits_for: What is missing for its next process; empty if nothing is.
    """

    def __init__(self, instance: StageInstance, credit: Credit) -> None:
        self.instance = instance
        self.state = StageState.STARTING
        self.epoch = 0
        self.death = ""
        self.credit = credit
        self.num_requests = 0
        self.heard_s = self.more_s = 0.0
        self.node = self.node_name = ""
        self.weight_version = DEFAULT_WEIGHT_VERSION
        self.waits_for = ""

    @property
    def config(self) -> OmniStageConfig:
        return self.instance.stage

    @property
    def stage_id(self) -> int:
        return self.instance.stage.stage_id

    @property
    def instance_id(self) -> int:
        return self.instance.instance_id

    @property
    def label(self) -> str:
        return self.instance.label

    @property
    def is_up(self) -> bool:
        """Whether its process knows its requests: it has become ready, and has not ended."""
        return self.state in (StageState.READY, StageState.UNRESPONSIVE)

    @property
    def does_verbs(self) -> bool:
        """Whether its process does what an operator asks for."""
        return self.is_up or self.state is StageState.OUTDATED

    def receives(self, message: Message) -> bool:
        """Whether its process is to have a message: a new one knows no request, and an outdated one takes none."""
        return self.does_verbs if isinstance(message, ControlMessage) else self.is_up

    @abstractmethod
    def submit(
        self,
        request: StageRequest,
        number: int,
        *,
        sources: list[int],
        targets: list[int],
        is_final: bool,
        streams: bool,
    ) -> None:
        """Sends the stage its part of a request. The stage is ready."""

    @abstractmethod
    def extend(self, request_id: str, stage_input: StageInput, is_last: bool) -> None:
        """Sends more input of a request that was submitted to the stage's process."""

    @abstractmethod
    def abort(self, request_ids: list[str]) -> None: ...

    @abstractmethod
    def send(self, message: Message) -> None:
        """Sends to the stage's process, if it `receives` the message."""

    @abstractmethod
    def peer_up(self, node: str) -> PeerUpMessage:
        """Announces its process to one on a machine. Of a stage that is up."""

    def on_ready(self, address: str, remote_address: str) -> None:
        """Takes the addresses at which the stage's process takes requests: of its machine, and of others."""
        self.state, self.waits_for = StageState.READY, ""

    def on_death(self, how: str) -> None:
        """Forgets the stage's process, which has ended, and what was sent to it; the next one has another address."""
        self.state = StageState.RESTARTING
        self.death = how
        self.credit.reset()
        self.epoch += 1


class OmniStage(StageHandle):
    """The handle of a replica whose process is reached through sockets."""

    def __init__(
        self,
        instance: StageInstance,
        run_dir: RunDir,
        context: zmq.Context,
        connector: ConnectorConfig,
        credit: Credit,
        copy_thread: Executor,
        command: Callable[[Callable[[], None]], None],
        on_send_error: Callable[[StageHandle, str, Exception], None],
        network: Network | None = None,
    ) -> None:
        """
        Args:
            copy_thread, command: See `Outgoing`.
            on_send_error: Called with a request's id when its data could not be sent, after the call that sends it.
            network: None: all stages are on this machine.
        """
        super().__init__(instance, credit)
        self._addresses = ("", "")
        self._peer = PayloadPeer(context, run_dir.path, ORCHESTRATOR, 0, self.instance_id, connector, network)
        self._outgoing = Outgoing(self._peer, copy_thread, command)
        self._on_send_error = on_send_error

    def submit(
        self,
        request: StageRequest,
        number: int,
        *,
        sources: list[int],
        targets: list[int],
        is_final: bool,
        streams: bool,
    ) -> None:
        buffers = self._peer.encode(request)
        make = partial(
            SubmitMessage,
            request_id=request.request_id,
            number=number,
            sources=sources,
            targets=targets,
            is_final=is_final,
            streams=streams,
        )
        cost = (0, 0) if sources else (1, num_bytes(buffers))

        def on_error(error: Exception) -> None:
            self.credit.refund(*cost)
            self._on_send_error(self, request.request_id, error)

        self._outgoing.send_payload(make, buffers, on_error)
        self.credit.spend(*cost)

    def extend(self, request_id: str, stage_input: StageInput, is_last: bool) -> None:
        information = AdditionalInformationPayload.from_dict(stage_input.additional_information)
        make = partial(
            InputMessage, request_id=request_id, num_ready_tokens=stage_input.num_ready_tokens, is_last=is_last
        )
        on_error = partial(self._on_send_error, self, request_id)
        self._outgoing.send_payload(make, self._peer.encode(information), on_error)

    def abort(self, request_ids: list[str]) -> None:
        self.send(AbortMessage(request_ids=request_ids))

    def send(self, message: Message) -> None:
        if self.receives(message):
            self._outgoing.send(message)

    def flush(self) -> None:
        """Sends what waits for a copy; returns when it is sent."""
        self._outgoing.flush(waits=True)

    def peer_up(self, node: str) -> PeerUpMessage:
        is_local = node == self.node
        address, remote_address = self._addresses
        return PeerUpMessage(
            instance_id=self.instance_id,
            epoch=self.epoch,
            address=address if is_local else remote_address,
            is_local=is_local,
        )

    def on_ready(self, address: str, remote_address: str) -> None:
        super().on_ready(address, remote_address)
        self._addresses = (address, remote_address)
        self._peer.connect(self.peer_up(""))

    def on_death(self, how: str) -> None:
        super().on_death(how)
        self._outgoing.clear()
        self._peer.disconnect()


@dataclass(slots=True)
class _WithPayload:
    """A message that waits.

    Attributes:
        make: The message, with its `payload`.
        copy: None: it was not started.
    """

    make: Callable[..., Message]
    buffers: Frames
    on_error: Callable[[Exception], None]
    copy: _Copy | None = None


class Outgoing:
    """Messages to one process. A large payload is copied on another thread, and what follows waits for it.

    Belongs to the orchestrator's thread. The peer's payloads are put by one thread at a time: the other thread has
    one of its payloads, or none.
    """

    def __init__(self, peer: PayloadPeer, copy_thread: Executor, command: Callable[[Callable[[], None]], None]) -> None:
        """
        Args:
            copy_thread: The thread that copies large payloads.
            command: Runs a function on the orchestrator's thread; raises `PipelineClosedError` when it has ended.
        """
        self._peer, self._copy_thread, self._command = peer, copy_thread, command
        self._waiting: deque[Message | _WithPayload] = deque()

    def send(self, message: Message) -> None:
        """Sends a message after all that came before it."""
        if self._waiting:
            self._waiting.append(message)
        else:
            self._peer.send(message)

    def send_payload(
        self, make: Callable[..., Message], buffers: Frames, on_error: Callable[[Exception], None]
    ) -> None:
        """Sends a message with a payload.

        Args:
            make: The message, with its `payload`.
            buffers: As `PayloadPeer.encode` returns them.
            on_error: Called if the payload cannot be put and this has returned. What follows is sent.

        Raises:
            OSError: It cannot be put.
            RuntimeError: There is no thread to copy it.
        """
        message = _WithPayload(make, buffers, on_error)
        if self._waiting:
            self._waiting.append(message)
        elif self._is_large(buffers):
            self._start(message)
            self._waiting.append(message)
        else:
            self._send(message, *self._peer.put_buffers(buffers))

    def flush(self, *, waits: bool = False) -> None:
        """Sends what waits, up to a payload that is being copied; `waits`: all of it."""
        while self._waiting:
            message = self._waiting[0]
            if not isinstance(message, _WithPayload):
                self._waiting.popleft()
                self._peer.send(message)
                continue
            try:
                if message.copy is None and self._is_large(message.buffers):
                    self._start(message)
                if message.copy is not None and not (waits or message.copy.done()):
                    return
                put = self._peer.put_buffers(message.buffers) if message.copy is None else message.copy.result()
            except Exception as error:
                self._waiting.popleft()
                message.on_error(error)
            else:
                self._waiting.popleft()
                self._send(message, *put)

    def clear(self) -> None:
        """The process has died: nothing is sent to it any more. Waits for the copy that runs."""
        copies = [each.copy for each in self._waiting if isinstance(each, _WithPayload) and each.copy is not None]
        self._waiting.clear()
        wait(copies)

    def _is_large(self, buffers: Frames) -> bool:
        return self._peer.is_local and num_bytes(buffers) >= LARGE_BYTES

    def _start(self, message: _WithPayload) -> None:
        message.copy = self._copy_thread.submit(self._peer.put_buffers, message.buffers)
        message.copy.add_done_callback(self._on_copied)

    def _on_copied(self, copy: _Copy) -> None:
        """Called on any thread."""
        with contextlib.suppress(PipelineClosedError):
            self._command(self.flush)

    def _send(self, message: _WithPayload, payload: PayloadRef, frames: Frames) -> None:
        self._peer.send(message.make(payload=payload), frames)


def num_bytes(buffers: Frames) -> int:
    """The size of a payload, as its `PayloadRef` has it."""
    return sum(memoryview(buffer).nbytes for buffer in buffers)
