# SPDX-License-Identifier: Apache-2.0
"""The messages that reach a process. Belongs to the thread that polls.

A payload on another machine is fetched first. Until it is there, its message waits, and those of the same request
behind it; all other messages pass.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from vllm_omni.distributed.connectors.network import PayloadFetcher
from vllm_omni.distributed.messages import ORCHESTRATOR, AbortMessage, IsCurrent, Message, NetworkRef, SubmitMessage

Received = tuple[Any, list[memoryview]]


class Inbound:
    """Receives from several sockets."""

    def __init__(
        self,
        sockets: Sequence[zmq.Socket],
        recv: Callable[..., Received | None],
        is_current: IsCurrent,
        fetcher: PayloadFetcher | None = None,
    ) -> None:
        """
        Args:
            recv: `messages.recv_at_stage` or `messages.recv_at_orchestrator`.
            is_current: See there.
            fetcher: None: all senders are on this machine.
        """
        self._sockets = sockets
        self._recv = functools.partial(recv, is_current=is_current)
        self._fetcher = fetcher
        self._ready: deque[Received] = deque()
        self._waiting: dict[str, deque[Received]] = {}  # in order; the first has a payload that is being fetched
        self._fetched: dict[str, list[memoryview]] = {}  # by key; empty: it is gone
        self._addresses: dict[int, str] = {}  # of payloads, by sender

    @property
    def readables(self) -> list[zmq.Socket | int]:
        """What has to be polled."""
        return [*self._sockets, *([] if self._fetcher is None else self._fetcher.readables)]

    def receive(self) -> Received | None:
        """The next message and its payload frames, or None if there is none.

        Raises:
            MessageError: It cannot be decoded; it is dropped.
        """
        while not self._ready:
            for socket in self._sockets:
                if (received := self._recv(socket)) is not None:
                    self._accept(*received)
                    break
            else:
                self._take_fetched()
                return self._ready.popleft() if self._ready else None
        return self._ready.popleft()

    def drop_sender(self, instance_id: int) -> None:
        """An instance's process has died, and what has not been fetched from it is gone. Its messages that wait for it
        are dropped, as those that were not received: to who handles them, an output without its payload is a failure.
        """
        dropped = []
        for queue in self._waiting.values():
            for received in [each for each in queue if sender_of(each[0]) == instance_id]:
                queue.remove(received)
                dropped.append(getattr(received[0], "payload", None))
        if (address := self._addresses.pop(instance_id, None)) is not None:
            assert self._fetcher is not None
            self._fetcher.disconnect(address)
            self._take_fetched()
        for ref in dropped:
            if isinstance(ref, NetworkRef):
                self._fetched.pop(ref.key, None)

    def _accept(self, message: Message, frames: list[memoryview]) -> None:
        if isinstance(message, AbortMessage):
            self._ready.append((message, frames))
            self._stop(lambda other: getattr(other, "request_id", None) in message.request_ids)
            return
        ref = getattr(message, "payload", None)
        is_remote = isinstance(ref, NetworkRef)
        if is_remote:
            assert self._fetcher is not None and isinstance(ref, NetworkRef)
            self._fetcher.start(ref)
            self._addresses[sender_of(message)] = ref.address
        queue = self._waiting.get(_queue_of(message))
        if queue is not None:
            queue.append((message, frames))
        elif is_remote:
            self._waiting[_queue_of(message)] = deque([(message, frames)])
        else:
            self._ready.append((message, frames))

    def _stop(self, concerns: Callable[[Message], bool]) -> None:
        """Hands messages over without the payloads that were not fetched."""
        if self._fetcher is None:
            return
        for queue in self._waiting.values():
            for message, _ in queue:
                if concerns(message) and isinstance(ref := getattr(message, "payload", None), NetworkRef):
                    self._fetcher.stop(ref)
        self._take_fetched()

    def _take_fetched(self) -> None:
        if self._fetcher is None:
            return
        for fetched, buffers in self._fetcher.take_ended():
            self._fetched[fetched.key] = buffers or []
        for name, queue in list(self._waiting.items()):
            while queue:
                message, frames = queue[0]
                ref = getattr(message, "payload", None)
                if isinstance(ref, NetworkRef):
                    if ref.key not in self._fetched:
                        break
                    frames = self._fetched.pop(ref.key)
                queue.popleft()
                self._ready.append((message, frames))
            if not queue:
                del self._waiting[name]


def _queue_of(message: Message) -> str:
    """Messages with the same value stay in order. A stage with sources relies on the order of all its submits."""
    if isinstance(message, SubmitMessage) and message.sources:
        return ""
    return getattr(message, "request_id", "")


def sender_of(message: Message) -> int:
    """The instance that sent a message with a payload."""
    return getattr(message, "source", getattr(message, "instance_id", ORCHESTRATOR))
