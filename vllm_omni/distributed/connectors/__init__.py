# SPDX-License-Identifier: Apache-2.0
"""How payloads travel between processes: a connector sends them, a receiver of the reference's type reads them.

The structs that stages exchange become buffers and back without pickle: vLLM's msgpack coders carry tensors, arrays and
multimodal features beside the message. A sender and a receiver each belong to one thread.
"""

import os
import threading
from pathlib import Path
from typing import Any, TypeVar, cast

from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni.config.stage_config import ConnectorConfig
from vllm_omni.distributed.connectors.base import Connector, InlineConnector, Receiver
from vllm_omni.distributed.connectors.network import FetchedReceiver
from vllm_omni.distributed.connectors.shared_memory import (
    SharedMemoryConnector,
    SharedMemoryReceiver,
    payload_prefix,
    remove_payloads,
    remove_segments,
)
from vllm_omni.distributed.messages import Frames, InlineRef, NetworkRef, PayloadRef, SharedMemoryRef

__all__ = [
    "Connector",
    "InlineConnector",
    "PayloadReceiver",
    "PayloadSender",
    "Receiver",
    "SharedMemoryConnector",
    "SharedMemoryReceiver",
    "make_connector",
    "make_receivers",
    "remove_payloads",
    "remove_segments",
]

T = TypeVar("T")

# msgspec caches what it learns about a struct for all threads, and other threads see the cache while it is incomplete:
# two threads that create the first decoders of one type at the same time crash the process.
_decoder_lock = threading.Lock()


def make_connector(config: ConnectorConfig, run_dir: Path, sender: int, receiver: int) -> Connector:
    """The connector that `runtime.connectors` configures, for payloads of this process from one stage to another.

    Args:
        run_dir: The pipeline's run directory.
    """
    if config.name == "InlineConnector":
        return InlineConnector()
    prefix = payload_prefix(os.getpid(), sender, receiver)
    return SharedMemoryConnector(run_dir, prefix, config.shm_threshold_bytes)


def make_receivers(run_dir: Path) -> dict[type, Receiver]:
    """A receiver for each type of reference.

    Args:
        run_dir: The pipeline's run directory: no file outside of it is opened.
    """
    return {InlineRef: InlineConnector(), SharedMemoryRef: SharedMemoryReceiver(run_dir), NetworkRef: FetchedReceiver()}


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
