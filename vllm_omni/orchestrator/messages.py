# SPDX-License-Identifier: Apache-2.0
"""Every message that crosses a process, on one page.

    orchestrator -> stage         SubmitMessage, AbortMessage, ShutdownMessage
    stage -> next stage           DataMessage
    stage -> orchestrator         ReadyMessage, ResultMessage, ErrorMessage

A message is one small msgpack frame. A payload that is carried inline follows it in further frames of
the same multipart message; a larger one is described by its `PayloadRef` and read through a connector.

`number` counts a pipeline's requests from 1. Each stage is told of the requests that it takes part in, in order,
so a message that runs ahead of its `SubmitMessage` can be told from one that comes too late.
"""

from collections.abc import Sequence

import msgspec
import zmq

from vllm_omni.outputs import StageMetrics

PROTOCOL_VERSION = 1


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a payload is. `sizes` are its buffers' lengths in bytes; no `path` means inline."""

    sizes: list[int] = []
    path: str | None = None


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of all messages."""


class SubmitMessage(Message):
    """A request that this stage takes part in. The payload is its `StageRequest`."""

    request_id: str
    number: int
    sources: list[int]
    """Stages whose outputs this request waits for here; empty at the first stage."""
    targets: list[int]
    """Stages that take this stage's output for this request."""
    is_final: bool
    """Whether the output also goes to the caller."""
    payload: PayloadRef


class AbortMessage(Message):
    """Stop working on these requests and forget them."""

    request_ids: list[str]


class ShutdownMessage(Message):
    """Finish nothing, leave nothing, exit."""


class DataMessage(Message):
    """One stage's complete output for a request, sent to the next. The payload is a `StageOutput`."""

    request_id: str
    number: int
    source: int
    payload: PayloadRef


class ReadyMessage(Message):
    """The stage takes requests."""

    stage_id: int
    protocol_version: int = PROTOCOL_VERSION


class ResultMessage(Message):
    """The stage is done with a request. A final stage's payload is its `StageOutput`."""

    request_id: str
    stage_id: int
    metrics: StageMetrics
    payload: PayloadRef | None = None


class ErrorMessage(Message):
    """The stage failed this request; `invalid` if the request itself was at fault."""

    request_id: str
    stage_id: int
    error: str
    traceback: str
    invalid: bool = False


StageInbound = SubmitMessage | DataMessage | AbortMessage | ShutdownMessage
OrchestratorInbound = ReadyMessage | ResultMessage | ErrorMessage

_encoder = msgspec.msgpack.Encoder()
_stage_decoder = msgspec.msgpack.Decoder(StageInbound)
_orchestrator_decoder = msgspec.msgpack.Decoder(OrchestratorInbound)

Frames = Sequence[bytes | bytearray | memoryview]


def send(socket: zmq.Socket, message: Message, frames: Frames = ()) -> None:
    """Sends a message and the frames of its inline payload, if it has one."""
    socket.send_multipart([_encoder.encode(message), *frames], copy=False)


def recv_at_stage(socket: zmq.Socket) -> tuple[StageInbound, list[memoryview]] | None:
    """The next message for a stage and its payload frames, or None if nothing waits."""
    return _recv(socket, _stage_decoder)


def recv_at_orchestrator(socket: zmq.Socket) -> tuple[OrchestratorInbound, list[memoryview]] | None:
    """The next message for the orchestrator and its payload frames, or None if nothing waits."""
    return _recv(socket, _orchestrator_decoder)


def _recv(socket: zmq.Socket, decoder: msgspec.msgpack.Decoder) -> tuple | None:
    try:
        head, *frames = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return decoder.decode(head.buffer), [frame.buffer for frame in frames]
