# SPDX-License-Identifier: Apache-2.0
"""Starts stage processes on this machine for an orchestrator on another one.

No part of any data path: stages talk to each other, and to the orchestrator, directly.
"""

import contextlib
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from vllm_omni.distributed.curve import CurveKeys
from vllm_omni.distributed.node_messages import (
    KEEP_ALIVE_S,
    ORCHESTRATOR_TIMEOUT_S,
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
    decode_at_node,
    encode,
    unheard_s,
)
from vllm_omni.distributed.run_dir import RunDir
from vllm_omni.distributed.sockets import arrived
from vllm_omni.distributed.wake_up import WakeUp
from vllm_omni.launch.fork_server import ForkServer, StageProcess, wait_for_all
from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)

_CONNECT_S = 30.0
_END_S = 5.0


class NodeServer:
    """Runs until the orchestrator ends it, or does not answer; then no stage process is left."""

    def __init__(self, name: str, node: str, orchestrator: str, keys: CurveKeys, lifeline: socket.socket) -> None:
        """
        Args:
            name: Unique in the pipeline.
            node: The machine in messages.
            orchestrator: The ZMQ endpoint of its `Nodes`.
            lifeline: The server ends when the other end is closed.
        """
        self._node = node
        self._lifeline = lifeline
        self._processes: dict[int, StageProcess] = {}
        self._ending: set[int] = set()
        self._forked: list[tuple[int, StageProcess | str]] = []
        self._is_running = True
        with contextlib.ExitStack() as opened:
            self._run_dir = RunDir()
            opened.callback(self._run_dir.remove)
            self._server = ForkServer()
            opened.callback(self._server.close)
            self._wake_up = WakeUp()
            opened.callback(self._wake_up.close)
            context = zmq.Context()
            opened.callback(context.destroy, linger=1000)
            self._socket = context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.ROUTING_ID, name.encode())
            keys.secure_client(self._socket)
            self._socket.connect(orchestrator)
            self._forks = ThreadPoolExecutor(1, "omni-fork")  # The first waits for the server's imports.
            opened.callback(self._forks.shutdown, cancel_futures=True)
            opened.callback(self._end_all)
            self._cleanup = opened.pop_all()

    def run(self) -> None:
        """Returns when it has been ended, or the orchestrator has not answered for `ORCHESTRATOR_TIMEOUT_S` seconds."""
        with self._cleanup:
            self._send(Hello(node=self._node, run_dir=str(self._run_dir.path)))
            last_sent = listened_at = time.monotonic()
            lease = listened_at + _CONNECT_S
            while self._is_running:
                self._poll(KEEP_ALIVE_S / 2)
                if self._take_messages():
                    lease = time.monotonic() + ORCHESTRATOR_TIMEOUT_S
                self._report_forks()
                self._report_ends()
                if time.monotonic() - last_sent > KEEP_ALIVE_S:
                    self._send(KeepAlive())
                    last_sent = time.monotonic()
                previous, listened_at = listened_at, time.monotonic()
                lease += unheard_s(previous, listened_at)
                if listened_at > lease:
                    logger.error("the orchestrator does not answer; node %s ends its stages", self._node)
                    return

    def _poll(self, timeout: float) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_up.fileno(), zmq.POLLIN)
        poller.register(self._lifeline.fileno(), zmq.POLLIN)
        for process in self._processes.values():
            for fd in process.filenos():
                poller.register(fd, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * timeout)))
        self._wake_up.clear()
        if self._lifeline.fileno() in ready:
            self._is_running = False

    def _take_messages(self) -> bool:
        """Whether there was one."""
        has_heard = False
        for (data,) in arrived(self._socket):
            has_heard = True
            self._on_message(decode_at_node(data))
        return has_heard

    def _on_message(self, message: ToNode) -> None:
        match message:
            case Preload():
                self._server.preload(message.modules)
            case Fork():
                self._forks.submit(self._fork, message)
            case Kill():
                if message.number in self._processes:
                    self._processes[message.number].kill()
            case Shutdown():
                self._is_running = False
            case KeepAlive():
                pass

    def _fork(self, message: Fork) -> None:
        """Forks a stage process. Runs on the thread that forks."""
        try:
            result: StageProcess | str = self._server.fork(message.spec, message.timeout)
        except (OSError, EOFError) as error:
            result = str(error)
        self._forked.append((message.number, result))
        self._wake_up.set()

    def _report_forks(self) -> None:
        while self._forked:
            number, result = self._forked.pop(0)
            if isinstance(result, str):
                self._send(Forked(number, result))
            else:
                self._processes[number] = result
                self._send(Forked(number))

    def _report_ends(self) -> None:
        for number, process in list(self._processes.items()):
            process.update()
            if process.has_ended:
                del self._processes[number]
                self._send(Ended(number, process.close()))
            elif process.is_ending and number not in self._ending:
                self._ending.add(number)
                self._send(Ending(number))

    def _send(self, message: FromNode) -> None:
        self._socket.send(encode(message))

    def _end_all(self) -> None:
        for _, result in self._forked:
            if not isinstance(result, str):
                result.kill()
        for process in self._processes.values():
            process.kill()
        wait_for_all(list(self._processes.values()), _END_S)
        for process in self._processes.values():
            process.close()


def encode_spec(name: str, node: str, orchestrator: str, keys: CurveKeys) -> bytes:
    """The arguments of `NodeServer`, for its lifeline: a command line could be read by other users."""
    return msgspec.json.encode([name, node, orchestrator, keys]) + b"\n"


def main() -> None:
    """Runs a node server, and ends this process with it. The file descriptor of its lifeline is the first argument."""
    lifeline = socket.socket(fileno=int(sys.argv[1]))
    with lifeline.makefile("rb") as file:
        name, node, orchestrator, keys = msgspec.json.decode(file.readline(), type=tuple[str, str, str, CurveKeys])
    try:
        NodeServer(name, node, orchestrator, keys, lifeline).run()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
