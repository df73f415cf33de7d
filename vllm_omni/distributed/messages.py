# SPDX-License-Identifier: Apache-2.0
"""Every message that crosses a process, on one page.

    orchestrator -> stage         SubmitMessage, InputMessage, AbortMessage, PeerDownMessage, PeerUpMessage,
                                  ControlMessage, ShutdownMessage
    stage -> next stage           DataMessage
    stage -> its sources          RefundMessage
    stage -> orchestrator         ReadyMessage, OutputMessage, TextsMessage, ResultMessage, ErrorMessage,
                                  StatsMessage, MetricsMessage, AliveMessage, FaultMessage, ControlResult

A message is one frame: a header with the sender and the version of this page, msgpack, and the payload if it is
carried inline. Any other payload is described by its `PayloadRef` and read through a connector.

An `instance_id` is that of a replica of a stage (`config.stage_config.StageInstance`), and so are `sources`, `targets`
and senders: here, a stage is one of its replicas. `number` counts a pipeline's requests from 1. Each replica receives
its `SubmitMessage`s in this order, so it can tell data that arrives before its `SubmitMessage` from data that arrives
too late. `epoch` counts the processes of a replica, from 0; every message carries its sender's, so that late messages
of a process that was given up are dropped. Its `address` is a ZMQ endpoint that it chooses and
announces in its `ReadyMessage`; the orchestrator passes it on to its neighbours in a `PeerUpMessage`.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import zmq

from vllm_omni.control import DEFAULT_WEIGHT_VERSION, AnyVerb
from vllm_omni.metrics.stats import MetricFamily, StageMetrics, StageStats

PROTOCOL_VERSION = 10
ORCHESTRATOR = -1
"""The orchestrator's id as a sender."""
HEARTBEAT_S = 3.0
"""A stage that is ready sends the orchestrator some message at least as often, while its IO thread works."""


class _Ref(msgspec.Struct, frozen=True, kw_only=True):
    sizes: list[int] = []
    """Lengths of the payload's buffers in bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


class InlineRef(_Ref, frozen=True, kw_only=True, tag="inline"):
    """A payload that the message itself carries."""


class SharedMemoryRef(_Ref, frozen=True, kw_only=True, tag="shm"):
    """A payload in a file of the pipeline's run directory, on a memory file system of this machine.

    Attributes:
        name: Of the file.
    """

    name: str


class NetworkRef(_Ref, frozen=True, kw_only=True, tag="network"):
    """A payload that its sender, on another machine, keeps until it is fetched.

    Attributes:
        address: The ZMQ endpoint of the sender's `PayloadServer`.
        key: Hexadecimal; whoever knows it may fetch the payload.
        nixl: With NIXL: what `NixlAgent.read` needs.
    """

    address: str
    key: str
    nixl: tuple[bytes, bytes] | None = None


PayloadRef = InlineRef | SharedMemoryRef | NetworkRef
"""Where a payload is."""


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of all messages."""


class SubmitMessage(Message):
    """A request that this stage works on. The payload is its `StageRequest`."""

    request_id: str
    number: int
    sources: list[int]
    """Stages whose outputs this request waits for here; empty at the first stage."""
    targets: list[int]
    """Stages that take this stage's output for this request."""
    is_final: bool
    """Whether the output also goes to the caller."""
    streams: bool
    """Whether the caller reads the output while it is made."""
    payload: PayloadRef


class InputMessage(Message):
    """More input of a request, at a stage that reads the prompt. The payload is an `AdditionalInformationPayload`."""

    request_id: str
    num_ready_tokens: int | None
    """As in `StageInput`."""
    is_last: bool
    payload: PayloadRef


class AbortMessage(Message):
    """Stop working on these requests and forget them."""

    request_ids: list[str]


class PeerDownMessage(Message):
    """A stage's process died. What was sent to it is lost, and what it sent may be."""

    instance_id: int
    epoch: int
    """Of the process that died."""
    finished: list[str]
    """Requests that it had finished; if its output does not arrive, it is lost."""


class PeerUpMessage(Message):
    """A process of a neighbour takes requests and data.

    Attributes:
        is_local: Whether it is on the receiver's machine.
    """

    instance_id: int
    epoch: int
    address: str
    is_local: bool = True


class ControlMessage(Message):
    """Something for the stage's engine to do between two steps. The answer is a `ControlResult`.

    Attributes:
        number: The answer has it.
    """

    number: int
    verb: AnyVerb


class ShutdownMessage(Message):
    """Exit without finishing requests."""


class DataMessage(Message):
    """A piece of one stage's output for a request, sent to the next. The payload is a `StageOutput`."""

    request_id: str
    number: int
    source: int
    sequence: int
    """Counts the pieces of one request on this edge, from 0."""
    is_last: bool
    sent: float
    """`time.monotonic()` of the sender."""
    payload: PayloadRef


class RefundMessage(Message):
    """Credit that this stage returns to a source. See `distributed.credit`."""

    instance_id: int
    num_requests: int
    num_bytes: int


class ReadyMessage(Message):
    """The stage's process of this epoch takes requests.

    Attributes:
        address: For processes of its machine.
        remote_address: For others; empty: there are none.
        weight_version: Of its weights; empty: it could not load those that it should.
    """

    instance_id: int
    epoch: int
    address: str
    remote_address: str = ""
    weight_version: str = DEFAULT_WEIGHT_VERSION


class OutputMessage(Message):
    """A segment of a final stage's output, for a streaming client. The payload is a `StageOutput`."""

    request_id: str
    instance_id: int
    payload: PayloadRef


class TextsMessage(Message):
    """Segments of text, of several requests: a step makes one for each. The payload is a list of `StageOutput`s, and
    always inline, so it waits for nothing."""

    instance_id: int
    payload: PayloadRef


class ResultMessage(Message):
    """The stage is done with a request. A final stage's payload is (the last piece of) its `StageOutput`."""

    request_id: str
    instance_id: int
    metrics: StageMetrics
    sent_to: dict[int, int]
    """Epochs of the targets to which the output was sent. A target that was down gets it later and is not included."""
    payload: PayloadRef | None = None


class ErrorMessage(Message):
    """The stage failed this request.

    Attributes:
        invalid: The request is invalid.
        dead_instance: Set if the failure is that stage's, which died with data of the request.
    """

    request_id: str
    instance_id: int
    error: str
    traceback: str = ""
    invalid: bool = False
    dead_instance: int | None = None


class StatsMessage(Message):
    """The stage's totals since it started."""

    instance_id: int
    stats: StageStats


class MetricsMessage(Message):
    """The metrics of the stage's engine."""

    instance_id: int
    families: list[MetricFamily]


class AliveMessage(Message):
    """The stage's IO thread works, and has sent nothing else for `HEARTBEAT_S`, or starts what may take longer.

    Attributes:
        more_s: What its next work may take in addition to the stage's `step_timeout_s`.
    """

    instance_id: int
    more_s: float = 0.0


class ControlResult(Message):
    """A stage has done what a `ControlMessage` asked for, or could not.

    Attributes:
        value: What the verb returns: plain data.
        error: Why it could not; empty: it has.
        invalid: The verb's arguments are wrong, or the stage does not know it.
        weight_version: Of the stage's weights now; empty: not known.
    """

    instance_id: int
    number: int
    value: Any = None
    error: str = ""
    invalid: bool = False
    weight_version: str = DEFAULT_WEIGHT_VERSION


class FaultMessage(Message):
    """A peer sent a message that cannot be decoded."""

    instance_id: int
    peer: int
    error: str


StageInbound = (
    SubmitMessage
    | InputMessage
    | AbortMessage
    | PeerDownMessage
    | PeerUpMessage
    | ControlMessage
    | ShutdownMessage
    | DataMessage
    | RefundMessage
)
OrchestratorInbound = (
    ReadyMessage
    | OutputMessage
    | TextsMessage
    | ResultMessage
    | ErrorMessage
    | StatsMessage
    | MetricsMessage
    | AliveMessage
    | FaultMessage
    | ControlResult
    | RefundMessage
)

_encoder = msgspec.msgpack.Encoder()
_stage_decoder = msgspec.msgpack.Decoder(StageInbound)
_orchestrator_decoder = msgspec.msgpack.Decoder(OrchestratorInbound)
_MARK = b"omni"
_header = struct.Struct("<4sHi")  # mark, version, sender: the same in every version
_rest = struct.Struct("<II")  # the sender's epoch, bytes of the message

Frames = Sequence[bytes | bytearray | memoryview]


class MessageError(Exception):
    """A message cannot be decoded. `sender` is the instance that sent it, None if the header is unreadable too."""

    def __init__(self, reason: str, sender: int | None) -> None:
        super().__init__(reason)
        self.sender = sender


IsCurrent = Callable[[int, int], bool]
"""Whether messages of this sender and epoch are to be received."""


def send(socket: zmq.Socket, message: Message, frames: Frames = (), *, sender: int, epoch: int = 0) -> None:
    """Sends a message and, behind it, its inline payload, if it has one."""
    body = _encoder.encode(message)
    head = _header.pack(_MARK, PROTOCOL_VERSION, sender)
    # One frame: each frame of a multipart message costs both sides several times what its bytes do.
    socket.send(b"".join((head, _rest.pack(epoch, len(body)), body, *frames)))


def recv_at_stage(
    socket: zmq.Socket, is_current: IsCurrent | None = None
) -> tuple[StageInbound, list[memoryview]] | None:
    """The next message for a stage and its payload frames, or None if there is none.

    Args:
        is_current: Other messages are dropped.

    Raises:
        MessageError: It cannot be decoded; it is dropped.
    """
    return _recv(socket, _stage_decoder, is_current)


def recv_at_orchestrator(
    socket: zmq.Socket, is_current: IsCurrent | None = None
) -> tuple[OrchestratorInbound, list[memoryview]] | None:
    """The next message for the orchestrator and its payload frames, or None if there is none. Raises as above."""
    return _recv(socket, _orchestrator_decoder, is_current)


def _recv(socket: zmq.Socket, decoder: msgspec.msgpack.Decoder, is_current: IsCurrent | None) -> tuple | None:
    while cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # Cheaper to ask than to catch `zmq.Again`.
        try:
            data = memoryview(socket.recv(flags=zmq.NOBLOCK))
        except zmq.Again:  # The sender has died, and its message is gone.
            break
        sender = _read_header(data)
        try:
            epoch, size = _rest.unpack_from(data, _header.size)
            if is_current is not None and not is_current(sender, epoch):
                continue
            start = _header.size + _rest.size
            frames = [data[start + size :]] if len(data) > start + size else []
            return decoder.decode(data[start : start + size]), frames
        except (struct.error, msgspec.MsgspecError) as error:
            raise MessageError(f"{type(error).__name__}: {error}", sender) from error
    return None


def _read_header(data: memoryview) -> int:
    """The sender."""
    if len(data) < _header.size:
        raise MessageError("no header", None)
    mark, version, sender = _header.unpack_from(data)
    if mark != _MARK:
        raise MessageError("no header", None)
    if version != PROTOCOL_VERSION:
        raise MessageError(f"its protocol version is {version}, this process has {PROTOCOL_VERSION}", sender)
    return sender
