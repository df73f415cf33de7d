# SPDX-License-Identifier: Apache-2.0
"""Turns the structs that stages exchange into buffers and back, without pickle.

vLLM's msgpack coders carry tensors, arrays and multimodal features beside the message; this file only binds them to a
connector. A channel belongs to one thread.
"""

import threading
from typing import Any, TypeVar, cast

from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni.distributed.connectors import Connector
from vllm_omni.distributed.messages import Frames, PayloadRef

T = TypeVar("T")

# msgspec keeps what it knows of a struct for all threads, and shows it to others while it is still finding out: two
# that make the first decoders of one type at the same time crash the process (stages that share a process do).
_making_decoder = threading.Lock()


class PayloadChannel:
    """Sends and receives typed payloads over a connector."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._encoder = MsgpackEncoder()
        self._decoders: dict[type, MsgpackDecoder] = {}

    def put(self, value: Any) -> tuple[PayloadRef, Frames]:
        return self._connector.put(cast(Frames, self._encoder.encode(value)))

    def get(self, payload_type: type[T], ref: PayloadRef, frames: list[memoryview]) -> T:
        """
        Raises:
            msgspec.MsgspecError: The payload is not a `payload_type`.
            OSError: The payload is gone.
        """
        decoder = self._decoders.get(payload_type)
        if decoder is None:
            with _making_decoder:
                decoder = self._decoders[payload_type] = MsgpackDecoder(payload_type)
        return decoder.decode(self._connector.get(ref, frames))

    def discard(self, ref: PayloadRef) -> None:
        self._connector.discard(ref)
