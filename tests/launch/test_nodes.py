# SPDX-License-Identifier: Apache-2.0
"""Stage processes of another machine, here of another process: they start and end, and no end is missed."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from tests.forked_programs import ForkedNodeServer
from tests.orchestrator.pipelines import TIMEOUT_S
from tests.orchestrator.test_failure import wait_until
from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, StageInstance
from vllm_omni.distributed.curve import Authenticator, CurveKeys
from vllm_omni.distributed.messages import ORCHESTRATOR, PeerUpMessage
from vllm_omni.distributed.node_messages import (
    NODE_TIMEOUT_S,
    Fork,
    Forked,
    FromNode,
    Hello,
    KeepAlive,
    Kill,
    ToNode,
    decode_at_node,
    encode,
)
from vllm_omni.distributed.sockets import arrived
from vllm_omni.launch import nodes
from vllm_omni.launch.node_server import encode_spec
from vllm_omni.launch.nodes import Nodes, RemoteStageProcess
from vllm_omni.stage.spec import StageSpec


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """No node is given up for what a busy machine does not run, but where a test is about that (`impatience`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "NODE_TIMEOUT_S", 60.0)
        yield


class Cluster:
    """An orchestrator's side, and node servers by name."""

    def __init__(self) -> None:
        self.keys = CurveKeys.make()
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context, self.keys)
        self.nodes = Nodes(self._context, "127.0.0.1", self.keys)
        self.servers: dict[str, psutil.Process] = {}
        self.run_dirs: dict[str, Path] = {}
        self.lifelines: dict[str, socket.socket] = {}
        self._started: list[ForkedNodeServer] = []

    def start(self, name: str) -> None:
        lifeline, its_end = socket.socketpair()
        with its_end:
            self._started.append(ForkedNodeServer(its_end))
        lifeline.sendall(encode_spec(name, name, self.nodes.address, self.keys))
        self.lifelines[name] = lifeline
        self.servers[name] = psutil.Process(self._started[-1].pid)
        self.run_dirs[name] = Path(self.nodes.wait_for(name, TIMEOUT_S))

    def fork(self, name: str) -> RemoteStageProcess:
        spec = StageSpec(
            instance=StageInstance(instance_id=0, replica=0, stage=OmniStageConfig(stage_id=0, engine_type="fake")),
            run_dir=str(self.run_dirs[name]),
            orchestrator=PeerUpMessage(
                instance_id=ORCHESTRATOR, epoch=0, address=f"ipc://{self.run_dirs[name]}/o.sock"
            ),
            connector=ConnectorConfig(name="InlineConnector"),
        )
        return self.nodes.fork(name, msgspec.json.encode(spec), TIMEOUT_S)  # The first waits for imports.

    def processes(self, name: str) -> list[psutil.Process]:
        """The server's, and those below it."""
        return [self.servers[name], *self.servers[name].children(recursive=True)]

    def close(self) -> None:
        self.nodes.close()
        for server in self._started:
            server.wait(60)
        self._authenticator.stop()
        self._context.destroy(linger=0)


class FakeNode:
    """A node that says what a test says."""

    def __init__(self, cluster: Cluster) -> None:
        self.socket = cluster._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, b"fake")
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        cluster.keys.secure_client(self.socket)
        self.socket.connect(cluster.nodes.address)

    def send(self, message: FromNode) -> None:
        self.socket.send(encode(message))

    def receive(self) -> ToNode:
        while isinstance(message := decode_at_node(self.socket.recv()), KeepAlive):
            self.send(KeepAlive())
        return message


@pytest.fixture
def fake_node() -> Iterator[tuple[Nodes, FakeNode]]:
    with contextlib.closing(Cluster()) as cluster:
        yield cluster.nodes, FakeNode(cluster)


def test_a_message_that_is_none_does_not_end_the_thread(fake_node: tuple[Nodes, FakeNode]) -> None:
    cluster, node = fake_node
    for frames in ([b""], [b"x"], [encode(KeepAlive())] * 2):
        node.socket.send_multipart(frames)
    node.send(Hello(node="n", run_dir="/run"))
    assert cluster.wait_for("fake", 60) == "/run" and cluster._dropped.count == 3


def test_a_process_that_is_forked_too_late_is_killed(fake_node: tuple[Nodes, FakeNode]) -> None:
    """It would hold its device until the end of the pipeline."""
    cluster, node = fake_node
    node.send(Hello(node="n", run_dir="/run"))
    cluster.wait_for("fake", 60)
    with pytest.raises(TimeoutError, match="node n did not start the process"):
        cluster.fork("fake", b"spec", timeout=-60.0)
    late = node.receive()
    assert isinstance(late, Fork) and node.receive() == Kill(late.number), "it may have been forked just now"
    node.send(Forked(late.number))
    assert node.receive() == Kill(late.number)
    threading.Thread(target=lambda: node.send(Forked(node.receive().number))).start()
    assert cluster.fork("fake", b"spec", timeout=60.0).node == "n"


@pytest.fixture(scope="module")
def opened() -> Iterator[Cluster]:
    with contextlib.closing(Cluster()) as cluster:
        yield cluster


@pytest.fixture
def cluster(opened: Cluster) -> Cluster:
    """With the node h1, which is that of the test before if it lives."""
    if not opened.nodes.is_alive("h1"):
        opened.start("h1")
    return opened


@contextlib.contextmanager
def impatience(cluster: Cluster) -> Iterator[None]:
    """The node h1 is given up when it is silent for as long as users have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "NODE_TIMEOUT_S", NODE_TIMEOUT_S)
        wait_until(lambda: cluster.nodes._nodes["h1"].due <= time.monotonic() + NODE_TIMEOUT_S)
        yield


def end_of(process: RemoteStageProcess) -> str:
    def has_ended() -> bool:
        process.update()
        return process.has_ended

    wait_until(has_ended)
    return process.close()


@pytest.mark.slow
def test_a_process_starts_and_is_killed(cluster: Cluster) -> None:
    first, second = cluster.fork("h1"), cluster.fork("h1")
    first.kill()
    assert end_of(first) == "it was killed by SIGKILL"
    second.update()
    assert not second.has_ended and not second.is_ending
    second.kill()
    end_of(second)


@pytest.mark.slow
def test_a_process_that_cannot_be_started_is_an_error(cluster: Cluster) -> None:
    process = cluster.nodes.fork("h1", b"[]", TIMEOUT_S)
    assert "ValidationError" in end_of(process)
    with pytest.raises(EOFError, match="the node is lost"):
        cluster.nodes.fork("h2", b"[]", TIMEOUT_S)


@pytest.mark.slow
def test_a_node_that_is_killed_is_noticed_and_leaves_nothing(cluster: Cluster) -> None:
    process = cluster.fork("h1")
    processes = cluster.processes("h1")
    with impatience(cluster):
        cluster.servers["h1"].kill()
        assert end_of(process) == f"node h1 did not answer for {NODE_TIMEOUT_S:g} s"
    assert psutil.wait_procs(processes, timeout=60)[1] == []


@pytest.mark.slow
def test_a_node_that_is_frozen_is_given_up_and_ends_its_stages_when_it_continues(cluster: Cluster) -> None:
    process = cluster.fork("h1")
    processes = cluster.processes("h1")
    with impatience(cluster):
        for one in processes:
            os.kill(one.pid, signal.SIGSTOP)
        assert "did not answer" in end_of(process) and not cluster.nodes.is_alive("h1")
    for one in processes:
        os.kill(one.pid, signal.SIGCONT)
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    cluster.start("h1")
    assert end_of_killed(cluster.fork("h1")) == "it was killed by SIGKILL", "it can come back"


def end_of_killed(process: RemoteStageProcess) -> str:
    process.kill()
    return end_of(process)


@pytest.mark.slow
def test_a_node_is_not_given_up_for_what_the_orchestrator_did_not_hear(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_late = threading.Event()

    def late(socket: zmq.Socket) -> list:
        messages = list(arrived(socket))
        if not messages and not is_late.is_set():
            threading.Event().wait(NODE_TIMEOUT_S + 1)  # as a thread that the system does not run for so long
            is_late.set()
        return messages

    with impatience(cluster):
        monkeypatch.setattr(nodes, "arrived", late)
        assert is_late.wait(60)
    assert end_of_killed(cluster.fork("h1")) == "it was killed by SIGKILL"


@pytest.mark.slow
def test_nothing_is_left_when_the_orchestrator_ends(cluster: Cluster) -> None:
    cluster.fork("h1")
    processes, run_dir = cluster.processes("h1"), cluster.run_dirs["h1"]
    assert len(processes) >= 3
    cluster.nodes.close()
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert not run_dir.exists()
    cluster.nodes = Nodes(cluster._context, "127.0.0.1", cluster.keys)  # for other tests, and for the fixture to close
