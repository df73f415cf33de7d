# SPDX-License-Identifier: Apache-2.0
"""Messages arrive with their payload, and invalid ones are refused with a reason."""

import struct
from collections.abc import Iterator

import pytest
import zmq

from vllm_omni.distributed.messages import (
    PROTOCOL_VERSION,
    AbortMessage,
    MessageError,
    recv_at_orchestrator,
    recv_at_stage,
    send,
)


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        push.connect("inproc://messages")
        pull.bind("inproc://messages")
        yield push, pull


def test_message_and_payload_arrive(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    push, pull = sockets
    assert recv_at_stage(pull) is None
    send(push, AbortMessage(request_ids=["é"]), sender=3)
    send(push, AbortMessage(request_ids=["b"]), [b"pay", bytearray(b"load")], sender=3)
    assert recv_at_stage(pull) == (AbortMessage(request_ids=["é"]), [])
    assert recv_at_stage(pull) == (AbortMessage(request_ids=["b"]), [b"payload"])
    assert recv_at_stage(pull) is None


def test_late_messages_of_a_process_that_was_given_up_are_dropped(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    push, pull = sockets
    for epoch in (0, 2, 1):
        send(push, AbortMessage(request_ids=[str(epoch)]), sender=3, epoch=epoch)
    received = recv_at_stage(pull, lambda sender, epoch: (sender, epoch) == (3, 2))
    assert received == (AbortMessage(request_ids=["2"]), [])
    assert recv_at_stage(pull, lambda sender, epoch: False) is None


@pytest.mark.parametrize(
    ("data", "reason", "sender"),
    [
        (b"", "no header", None),
        (b"anything that is long enough", "no header", None),
        (
            struct.pack("<4sHi", b"omni", PROTOCOL_VERSION + 1, 5) + b"?",
            f"protocol version is {PROTOCOL_VERSION + 1}",
            5,
        ),
        (struct.pack("<4sHi", b"omni", PROTOCOL_VERSION, 5), "error", 5),
        (struct.pack("<4sHiII", b"omni", PROTOCOL_VERSION, 5, 0, 3) + b"bad", "ValidationError", 5),
    ],
)
def test_an_invalid_message_is_refused_and_dropped(
    data: bytes, reason: str, sender: int | None, sockets: tuple[zmq.Socket, zmq.Socket]
) -> None:
    push, pull = sockets
    push.send(data)
    with pytest.raises(MessageError, match=reason) as caught:
        recv_at_stage(pull)
    assert caught.value.sender == sender
    assert recv_at_stage(pull) is None


def test_a_message_for_another_receiver_is_refused(sockets: tuple[zmq.Socket, zmq.Socket]) -> None:
    push, pull = sockets
    send(push, AbortMessage(request_ids=["a"]), sender=3)
    with pytest.raises(MessageError, match="AbortMessage"):
        recv_at_orchestrator(pull)
