# SPDX-License-Identifier: Apache-2.0
"""Turns the structs that stages exchange into buffers and back, without pickle.

vLLM's msgpack coders carry tensors, arrays and multimodal features beside the message; this file only combines them
with connectors. A sender and a receiver each belong to one thread.
"""

import threading
from pathlib import Path
from typing import Any, TypeVar, cast

from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni.distributed.connectors import Connector, make_receivers
from vllm_omni.distributed.messages import Frames, PayloadRef

T = TypeVar("T")

# msgspec caches what it learns about a struct for all threads, and other threads see the cache while it is incomplete:
# two threads that create the first decoders of one type at the same time crash the process.
_decoder_lock = threading.Lock()


class PayloadSender:
    """Sends typed payloads through a connector."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._encoder = MsgpackEncoder()

    def put(self, value: Any) -> tuple[PayloadRef, Frames]:
        """Raises `OSError` where the connector has no room, `TypeError` for a value that cannot be encoded."""
        return self.put_buffers(self.encode(value))

    def encode(self, value: Any) -> Frames:
        """The buffers of a payload, in which large tensors are not copied. Raises `TypeError`."""
        return cast(Frames, self._encoder.encode(value))

    def put_buffers(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        """Sends what `encode` returned; another thread may, while this one puts nothing. Raises `OSError`."""
        return self._connector.put(buffers)

    def remove_unread(self) -> None:
        """Removes the payloads that were not received: the receiver's process has died."""
        self._connector.remove_unread()


class PayloadReceiver:
    """Receives typed payloads, whatever connector sent them."""

    def __init__(self, run_dir: Path) -> None:
        """
        Args:
            run_dir: The pipeline's run directory.
        """
        self._receivers = make_receivers(run_dir)
        self._decoders: dict[type, MsgpackDecoder] = {}

    def get(self, payload_type: type[T], ref: PayloadRef, frames: list[memoryview]) -> T:
        """
        Raises:
            msgspec.MsgspecError: The payload is not a `payload_type`.
            OSError: The payload is gone.
            ValueError: The reference is wrong.
        """
        decoder = self._decoders.get(payload_type)
        if decoder is None:
            with _decoder_lock:
                decoder = self._decoders[payload_type] = MsgpackDecoder(payload_type)
        return decoder.decode(self._receivers[type(ref)].get(ref, frames))

    def discard(self, ref: PayloadRef) -> None:
        """Releases a payload that will not be read."""
        self._receivers[type(ref)].discard(ref)
