# SPDX-License-Identifier: Apache-2.0
"""What is sent to a stage's process, in order, while another thread copies the large payloads.

Encoding copies no tensor; the copy into shared memory takes a millisecond for each few megabytes, and releases the GIL.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

from vllm_omni.distributed.messages import Frames, Message, PayloadRef
from vllm_omni.distributed.peers import PayloadPeer
from vllm_omni.errors import PipelineClosedError

LARGE_BYTES = 1 << 20
"""Payloads from this size on are copied on the other thread: the hop costs less than the copy of so much."""

_Copy = Future[tuple[PayloadRef, Frames]]


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
