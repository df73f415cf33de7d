# SPDX-License-Identifier: Apache-2.0
"""Large payloads between machines.

The sender keeps a payload until its receiver has fetched it, in chunks: several payloads are fetched at the same time,
and none waits for a larger one. Chunks have sockets of their own, so that control messages never wait for them. No
tensor is copied but once, by the receiver, into memory of its own.

Each end belongs to one thread. A fetch needs the payload's key, which is random and travels in a control message: so
the receiver is authenticated even where the chunks are not encrypted.

Where NIXL is configured, the receiver reads the sender's memory with it instead of requesting chunks.
"""

import hashlib
import hmac
import itertools
import secrets
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from vllm.utils.math_utils import round_up

from vllm_omni.distributed.connectors.base import ALIGNMENT, Connector, InlineConnector, Receiver, padded, split
from vllm_omni.distributed.connectors.nixl import NixlAgent
from vllm_omni.distributed.curve import MAX_MESSAGE, CurveKeys
from vllm_omni.distributed.messages import Frames, NetworkRef, PayloadRef
from vllm_omni.distributed.sockets import Dropped, arrived

CHUNK = 1 << 20
"""Bytes."""
_AHEAD = 4
"""Chunks of a payload that are requested before the first of them has arrived."""
_KEY, _NONCE, _SECRET = 16, 8, 32
_MAX_INLINE = MAX_MESSAGE // 4
"""Bytes of a payload in a message, at most, whatever the threshold."""
_MAX_REQUEST = 4096
"""Bytes of a packet to a `PayloadServer`: more than its requests and the handshakes before them have."""
_head = struct.Struct(f"<{_KEY}sQQ")  # key, offset, size; size 0: the payload has been fetched, or is not needed


@dataclass(slots=True)
class _Payload:
    """
    Attributes:
        buffers: With what aligns them between them.
        registration: With NIXL; None: it is not read with NIXL.
    """

    receiver: int
    buffers: Sequence[memoryview]
    registration: Any = None


class PayloadServer:
    """The sender's end: has the payloads of this process that are to be fetched.

    Attributes:
        socket: To be polled; when it is readable, call `serve`.
        dropped: Packets that are no requests.
    """

    def __init__(self, context: zmq.Context, host: str, keys: CurveKeys | None, nixl: NixlAgent | None = None) -> None:
        """
        Args:
            host: The address to bind to; receivers must be able to connect to it.
            keys: None: chunks are not encrypted.
        """
        self._nixl = nixl
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.dropped = Dropped("request for a payload")
        if keys is not None:
            keys.secure_server(self.socket)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)
        self._secret = secrets.token_bytes(_SECRET)
        self._address = f"tcp://{host}:{self.socket.bind_to_random_port(f'tcp://{host}')}"
        self._payloads: dict[bytes, _Payload] = {}

    def put(self, receiver: int, buffers: Frames, uses_nixl: bool = False) -> NetworkRef:
        """The buffers must not change until they have been fetched."""
        nonce = secrets.token_bytes(_NONCE)
        key = nonce + self._sign(nonce)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        payload = _Payload(receiver, [memoryview(part) for part in padded(views)])
        nixl = None
        if uses_nixl:
            assert self._nixl is not None
            payload.registration = self._nixl.register(views)
            nixl = self._nixl.describe(payload.registration)
        self._payloads[key] = payload
        return NetworkRef(sizes=[view.nbytes for view in views], address=self._address, key=key.hex(), nixl=nixl)

    def remove_unread(self, receiver: int) -> None:
        """Removes the payloads for an instance whose process has died."""
        for key in [key for key, payload in self._payloads.items() if payload.receiver == receiver]:
            self._remove(key)

    def serve(self) -> None:
        """Answers all requests that have arrived."""
        for frames in arrived(self.socket):
            if len(frames) != 2 or len(frames[1]) != _head.size:
                self.dropped.add(frames[1:])
                continue
            peer, request = frames
            key, offset, size = _head.unpack(request)
            if not hmac.compare_digest(key[_NONCE:], self._sign(key[:_NONCE])):
                self.dropped.add(frames[1:])  # Answers that a stranger does not read would fill the memory.
                continue
            if not size:
                self._remove(key)
                continue
            payload = self._payloads.get(key)
            # An empty answer: the payload is gone.
            chunk = () if payload is None else _slice(payload.buffers, offset, size)
            self.socket.send_multipart([peer, request, *chunk], copy=False)

    def _sign(self, nonce: bytes) -> bytes:
        """The second part of a key, which tells the keys of this server, also of payloads that are gone."""
        return hashlib.blake2b(nonce, digest_size=_KEY - _NONCE, key=self._secret).digest()

    def _remove(self, key: bytes) -> None:
        payload = self._payloads.pop(key, None)
        if payload is not None and payload.registration is not None:
            assert self._nixl is not None
            self._nixl.deregister(payload.registration)


def _slice(buffers: Sequence[memoryview], offset: int, size: int) -> Iterator[memoryview]:
    """Parts of buffers that lie one after the other."""
    for buffer in buffers:
        if offset < buffer.nbytes and size > 0:
            part = buffer[offset : offset + size]
            size -= part.nbytes
            yield part
        offset = max(0, offset - buffer.nbytes)


class NetworkConnector(Connector):
    """Sends small payloads inline, and lets large ones be fetched."""

    def __init__(self, server: PayloadServer, receiver: int, threshold_bytes: int, uses_nixl: bool = False) -> None:
        self._server, self._receiver, self._threshold = server, receiver, min(threshold_bytes, _MAX_INLINE)
        self._uses_nixl = uses_nixl
        self._inline = InlineConnector()

    def put(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        if sum(memoryview(buffer).nbytes for buffer in buffers) < self._threshold:
            return self._inline.put(buffers)
        return self._server.put(self._receiver, buffers, self._uses_nixl), ()

    def remove_unread(self) -> None:
        self._server.remove_unread(self._receiver)


class FetchedReceiver(Receiver[NetworkRef]):
    """Reads payloads that `Inbound` has fetched."""

    def get(self, ref: NetworkRef, frames: list[memoryview]) -> list[memoryview]:
        if len(frames) != len(ref.sizes):
            raise OSError(f"a payload of {ref.num_bytes} bytes could not be fetched from {ref.address}: it is gone")
        return frames

    def discard(self, ref: NetworkRef) -> None:
        pass


@dataclass(slots=True)
class _Fetch:
    """A payload that is being fetched."""

    ref: NetworkRef
    data: memoryview
    requested: int = 0
    received: int = 0


class PayloadFetcher:
    """The receiver's end.

    Attributes:
        socket: For chunks.
        dropped: Packets that are no chunks.
    """

    def __init__(self, context: zmq.Context, keys: CurveKeys | None, nixl: NixlAgent | None = None) -> None:
        self._nixl = nixl
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, CHUNK + _MAX_REQUEST)  # Encryption adds to a chunk.
        if keys is not None:
            keys.secure_client(self.socket)
        self.dropped = Dropped("part of a payload")
        self._connected: set[str] = set()
        self._fetches: dict[bytes, _Fetch] = {}
        self._stopping: dict[bytes, NetworkRef] = {}  # NIXL still reads them
        self._ended: deque[tuple[NetworkRef, list[memoryview] | None]] = deque()

    @property
    def readables(self) -> list[zmq.Socket | int]:
        """What has to be polled; while one is readable, call `take_ended`."""
        return [self.socket, *([] if self._nixl is None else [self._nixl.fileno()])]

    def start(self, ref: NetworkRef) -> None:
        if ref.address not in self._connected:
            self._connected.add(ref.address)
            self.socket.setsockopt(zmq.CONNECT_ROUTING_ID, ref.address.encode())
            self.socket.connect(ref.address)
        key, size = bytes.fromhex(ref.key), sum(round_up(size, ALIGNMENT) for size in ref.sizes)
        # Not a bytearray, which is filled with zeros first.
        fetch = self._fetches[key] = _Fetch(ref, np.empty(size, np.uint8).data)
        if ref.nixl is not None:
            assert self._nixl is not None
            self._nixl.read(key, ref.nixl, split(fetch.data, ref.sizes, ALIGNMENT))
            return
        for _ in range(_AHEAD):
            self._request(fetch)

    def stop(self, ref: NetworkRef) -> None:
        """The payload is not needed; it ends as one that is gone."""
        key = bytes.fromhex(ref.key)
        if self._fetches.pop(key, None) is not None:
            if ref.nixl is None:
                self._send(ref, 0, 0)
            else:
                self._stopping[key] = ref
            self._ended.append((ref, None))

    def disconnect(self, address: str) -> None:
        """The sender has died; its payloads are gone."""
        for fetch in [fetch for fetch in self._fetches.values() if fetch.ref.address == address]:
            self.stop(fetch.ref)
        if address in self._connected:
            self._connected.remove(address)
            self.socket.disconnect(address)

    def take_ended(self) -> Iterator[tuple[NetworkRef, list[memoryview] | None]]:
        """The buffers of payloads that have arrived as a whole; None for those that are gone."""
        for frames in itertools.islice(arrived(self.socket, copy=False), _AHEAD):  # Messages wait meanwhile.
            if len(frames) < 2 or len(frames[1]) != _head.size:
                self.dropped.add(frames[1:])
            else:
                self._on_chunk(frames[1].buffer, frames[2:])
        if self._nixl is not None:
            for key, is_read in self._nixl.take_ended():
                if (fetch := self._fetches.get(key)) is not None:
                    self._end(key, fetch, is_read)
                else:
                    self._send(self._stopping.pop(key), 0, 0)
        while self._ended:
            yield self._ended.popleft()

    def _on_chunk(self, head: memoryview, parts: Sequence[zmq.Frame]) -> None:
        key, offset, size = _head.unpack(head)
        fetch = self._fetches.get(key)
        if fetch is None:
            return  # It was stopped.
        if sum(len(part) for part in parts) != size or offset + size > len(fetch.data):
            self._end(key, fetch, is_whole=False)
            return
        for part in parts:
            fetch.data[offset : offset + len(part)] = part.buffer
            offset += len(part)
        fetch.received += size
        if fetch.received < len(fetch.data):
            self._request(fetch)
        else:
            self._end(key, fetch, is_whole=True)

    def _end(self, key: bytes, fetch: _Fetch, is_whole: bool) -> None:
        del self._fetches[key]
        self._send(fetch.ref, 0, 0)
        self._ended.append((fetch.ref, split(fetch.data, fetch.ref.sizes, ALIGNMENT) if is_whole else None))

    def _request(self, fetch: _Fetch) -> None:
        size = min(CHUNK, len(fetch.data) - fetch.requested)
        if size:
            self._send(fetch.ref, fetch.requested, size)
            fetch.requested += size

    def _send(self, ref: NetworkRef, offset: int, size: int) -> None:
        self.socket.send_multipart([ref.address.encode(), _head.pack(bytes.fromhex(ref.key), offset, size)])
