# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's side of the machines of a pipeline: starts stage processes there, and notices their ends.

A thread of its own exchanges messages with the `NodeServer`s; a supervisor does not ask where a `StageProcess` is.
"""

import collections
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from vllm_omni.distributed.curve import CurveKeys
from vllm_omni.distributed.node_messages import (
    KEEP_ALIVE_S,
    NODE_TIMEOUT_S,
    Ended,
    Ending,
    Fork,
    Forked,
    FromNode,
    Hello,
    KeepAlive,
    Kill,
    Preload,
    Shutdown,
    ToNode,
    decode_at_orchestrator,
    encode,
    unheard_s,
)
from vllm_omni.distributed.sockets import Dropped, arrived
from vllm_omni.distributed.wake_up import WakeUp
from vllm_omni.launch.fork_server import StageProcess
from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)

_CANCELLED = "the pipeline was closed"


class RemoteStageProcess(StageProcess):
    """A stage process on another machine."""

    def __init__(self, number: int, node: str, kill: Callable[[], None]) -> None:
        self.pid = number
        self.node = node
        self.has_ended = False
        self._is_ending = False
        self._how = ""
        self._kill = kill
        self._reader, self._writer = socket.socketpair()
        self._news: collections.deque[Ending | Ended] = collections.deque()

    def tell(self, news: Ending | Ended) -> None:
        """Records what the node has reported. Runs on the thread of `Nodes`."""
        self._news.append(news)
        with contextlib.suppress(OSError):  # It is closed.
            self._writer.send(b"\0")

    @property
    def is_ending(self) -> bool:
        return self._is_ending

    def filenos(self) -> list[int]:
        return [self._reader.fileno()] if self._reader.fileno() >= 0 else []

    def update(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096, socket.MSG_DONTWAIT)
        while self._news:
            news = self._news.popleft()
            self._is_ending = True
            if isinstance(news, Ended):
                self.has_ended, self._how = True, news.how

    def kill(self) -> None:
        if not self.has_ended:
            self._kill()

    def close(self) -> str:
        self._reader.close()
        self._writer.close()
        return self._how or f"it was killed on node {self.node}, and has not ended yet"


@dataclass(slots=True)
class _Node:
    """
    Attributes:
        name: The machine in messages.
        due: When it is given up.
        starting: Forks that were not answered.
    """

    name: str
    run_dir: str
    due: float
    processes: dict[int, RemoteStageProcess] = field(default_factory=dict)
    starting: dict[int, threading.Event] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Nodes:
    """The machines of a pipeline, each with a `NodeServer`, by its name. For use from any thread."""

    def __init__(self, context: zmq.Context, host: str, keys: CurveKeys) -> None:
        """
        Args:
            context: With an `Authenticator` for `keys`.
            host: The address to bind to.
        """
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        keys.secure_server(self._socket)
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._dropped = Dropped("message of a node of this version")
        self._nodes: dict[str, _Node] = {}
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._outgoing: collections.deque[tuple[str, ToNode]] = collections.deque()
        self._wake_up = WakeUp()
        self._is_closed = self._is_cancelled = False
        self._thread = threading.Thread(target=self._run, name="omni-nodes", daemon=True)
        self._thread.start()

    def wait_for(self, node: str, timeout: float) -> str:
        """Waits until a node can start stages; returns its run directory.

        Raises:
            TimeoutError: It did not connect in time.
            EOFError: The wait was cancelled.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: node in self._nodes or self._is_cancelled, timeout):
                raise TimeoutError(
                    f"a node did not connect to {self.address} within {timeout:.0f} s; is that address reachable from "
                    "it (runtime.network_interface)?"
                )
            if self._is_cancelled:
                raise EOFError(_CANCELLED)
            return self._nodes[node].run_dir

    def is_alive(self, node: str) -> bool:
        with self._changed:
            return node in self._nodes

    def preload(self, node: str, modules: Sequence[str]) -> None:
        self._put(node, Preload(list(modules)))

    def fork(self, node: str, spec: bytes, timeout: float) -> RemoteStageProcess:
        """Starts a stage process.

        Raises as `ForkServer.fork`, and `EOFError` if the node is lost, or the wait for it was cancelled.
        """
        number, answered = next(self._numbers), threading.Event()
        with self._changed:
            found = self._nodes.get(node)
            if found is None:
                raise EOFError("the node is lost")
            if self._is_cancelled:
                raise EOFError(_CANCELLED)
            process = RemoteStageProcess(number, found.name, lambda: self._put(node, Kill(number)))
            found.processes[number], found.starting[number] = process, answered
        self._put(node, Fork(number, spec, timeout))
        # Longer than the node waits itself, so that its answer is the one that is reported.
        if not answered.wait(timeout + NODE_TIMEOUT_S):
            found.processes.pop(number, None)
            self._put(node, Kill(number))  # If it is forked later, that is answered with another one.
            raise TimeoutError(f"node {found.name} did not start the process in {timeout:.0f} s")
        if error := found.errors.pop(number, ""):
            raise EOFError(error)
        return process

    def cancel_waits(self) -> None:
        """Nodes are not waited for any more. What runs on them is not touched."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
            for node in self._nodes.values():
                for number, answered in list(node.starting.items()):
                    node.errors[number] = _CANCELLED
                    answered.set()

    def close(self) -> None:
        """Ends the nodes."""
        for node in list(self._nodes):
            self._put(node, Shutdown())
        self._is_closed = True
        self._wake_up.set()
        self._thread.join()
        self._wake_up.close()

    def _put(self, node: str, message: ToNode) -> None:
        self._outgoing.append((node, message))
        self._wake_up.set()

    # The thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_up.fileno(), zmq.POLLIN)
        next_keep_alive = listened_at = time.monotonic()
        while not self._is_closed or self._outgoing:
            poller.poll(int(1000 * KEEP_ALIVE_S / 2))
            self._wake_up.clear()
            self._take_messages()
            while self._outgoing:
                self._send(*self._outgoing.popleft())
            if time.monotonic() >= next_keep_alive:
                next_keep_alive = time.monotonic() + KEEP_ALIVE_S
                for node in self._nodes:
                    self._send(node, KeepAlive())
            previous, listened_at = listened_at, time.monotonic()
            self._give_up_overdue(listened_at, unheard_s(previous, listened_at))
        self._socket.close(linger=1000)

    def _take_messages(self) -> None:
        for frames in arrived(self._socket):
            try:
                name, data = frames
                received = name.decode(), decode_at_orchestrator(data)
            except (ValueError, msgspec.MsgspecError):  # Its package has another version, perhaps.
                self._dropped.add(frames[1:])
            else:
                self._on_message(*received)

    def _send(self, node: str, message: ToNode) -> None:
        self._socket.send_multipart([node.encode(), encode(message)])

    def _on_message(self, name: str, message: FromNode) -> None:
        if isinstance(message, Hello):
            with self._changed:
                self._nodes[name] = _Node(message.node, message.run_dir, time.monotonic() + NODE_TIMEOUT_S)
                self._changed.notify_all()
            return
        node = self._nodes.get(name)
        if node is None:
            self._send(name, Shutdown())  # It was given up.
            return
        node.due = time.monotonic() + NODE_TIMEOUT_S
        match message:
            case Forked():
                if message.error:
                    node.processes.pop(message.number, None)
                    node.errors[message.number] = message.error
                elif message.number not in node.processes:
                    self._send(name, Kill(message.number))
                if (starting := node.starting.pop(message.number, None)) is not None:
                    starting.set()
            case Ending():
                if message.number in node.processes:
                    node.processes[message.number].tell(message)
            case Ended():
                if (process := node.processes.pop(message.number, None)) is not None:
                    process.tell(message)

    def _give_up_overdue(self, now: float, unheard: float) -> None:
        """`unheard`: seconds in which the nodes may have answered, and this thread did not listen."""
        for name, node in list(self._nodes.items()):
            node.due += unheard
            if now > node.due:
                logger.error("node %s does not answer", node.name)
                with self._changed:
                    del self._nodes[name]
                how = f"node {node.name} did not answer for {NODE_TIMEOUT_S:g} s"
                for number, starting in node.starting.items():
                    node.errors[number] = how
                    starting.set()
                for number, process in node.processes.items():
                    process.tell(Ended(number, how))
