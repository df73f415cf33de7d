# SPDX-License-Identifier: Apache-2.0
"""Pipelines on several machines, here separate process trees on one: placement, death of a machine, and recovery.

`tests/distributed/` tests the network itself, `test_nodes.py` the servers on machines, `test_ray.py` Ray.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

import psutil
import pytest

from tests.forked_programs import ForkedNodeServer
from tests.orchestrator.pipelines import (
    FAR,
    TRIANGLE,
    Caller,
    error_of,
    make_config,
    open_orchestrator,
    opened,
    state_of,
    texts,
)
from tests.orchestrator.test_failure import is_ready, wait_until
from vllm_omni.distributed.run_dir import RunDir
from vllm_omni.errors import PipelineClosedError, StageDeadError, StageStartError
from vllm_omni.launch import nodes
from vllm_omni.launch.cluster import Cluster, Place

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node is given up for what a busy machine does not run: `give_up` says which one is lost."""
    monkeypatch.setattr(nodes, "NODE_TIMEOUT_S", 60.0)


def give_up(caller: Caller, node: str) -> None:
    """The orchestrator waits no longer for a node that was killed; what that had sent may still arrive."""
    servers = caller.orchestrator._launcher._nodes._nodes

    def is_given_up() -> bool:
        lost = [server for name, server in list(servers.items()) if name.startswith(f"{node}.")]
        for server in lost:
            server.due = 0.0
        return not lost

    wait_until(is_given_up)


class LoopbackCluster(Cluster):
    """Machines are process trees. Each process of the pipeline belongs on the named one; "" is the orchestrator's."""

    host = "127.0.0.1"

    def __init__(self, *nodes: str) -> None:
        self._nodes = list(nodes)
        self._servers: dict[str, psutil.Process] = {}
        self._lifelines: list[socket.socket] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def place(self, process: int, on_wait: Callable[[str], None]) -> Place:
        with self._changed:
            if self._nodes[process] == "none":
                on_wait("a node")
            self._changed.wait_for(lambda: self._is_closed or self._nodes[process] != "none")
            if self._is_closed:
                raise EOFError("closed")
            return Place(self._nodes[process], self._nodes[process], self.host)

    def start_server(self, node: str, spec: bytes, timeout: float) -> None:
        lifeline, its_end = socket.socketpair()
        with its_end:
            server = ForkedNodeServer(its_end)
        threading.Thread(target=server.wait, daemon=True).start()
        lifeline.sendall(spec)
        self._servers[node] = psutil.Process(server.pid)
        self._lifelines.append(lifeline)

    def processes_on(self, node: str) -> list[psutil.Process]:
        return [*self._servers[node].children(recursive=True), self._servers[node]]

    def kill(self, node: str) -> None:
        """All processes of a machine end at once; their directory goes with them, as memory does with a machine."""
        processes = self.processes_on(node)
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)
        RunDir().remove()  # Each start removes the directories of killed processes.

    def move(self, process: int, node: str) -> None:
        """It belongs elsewhere from its next start on; `none`: nowhere for now."""
        with self._changed:
            self._nodes[process] = node
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for lifeline in self._lifelines:
            lifeline.close()


def running(cluster: LoopbackCluster, *stages: dict, **runtime: object) -> contextlib.AbstractContextManager[Caller]:
    return opened(make_config(*(stages or TRIANGLE), **runtime), cluster=cluster)


def answers(caller: Caller) -> list[list[str]]:
    """To requests with payloads that are sent inline, fetched at once, and fetched in many chunks; and to streams."""
    found = []
    for size in (0, 300_000, 20_000_000):
        caller.submit(f"p{size}", fake_bytes=size)
        found.append(texts(caller.wait_one()))
    ids = [caller.submit(f"p{i}", streams=True, fake_tokens=5 + i) for i in range(8)]
    ends = caller.wait(8)
    return found + [texts(ends[request_id]) for request_id in ids]


def test_stages_on_three_machines_answer_as_on_one() -> None:
    config = make_config(*TRIANGLE)
    with contextlib.closing(open_orchestrator(config)) as orchestrator:
        expected = answers(Caller(orchestrator, config))
    cluster = LoopbackCluster("h1", "", "h2")
    with running(cluster) as caller:
        assert [stage.node for stage in caller.orchestrator.health()] == ["h1", "", "h2"]
        assert answers(caller) == expected
        processes = [*cluster.processes_on("h1"), *cluster.processes_on("h2")]
    for process in processes:
        process.wait()


def test_the_stages_of_a_machine_that_dies_start_elsewhere() -> None:
    cluster = LoopbackCluster("", "h1", "h2")
    with running(cluster, restart={"backoff_s": 0.01}) as caller:
        at_b = [caller.submit(f"p{i}", fake_seconds=FAR, fake_only="b") for i in range(3)]
        text = caller.submit("text", ("text",), fake_seconds=1)
        wait_until(lambda: caller.orchestrator.activity()["b"] == 3)
        cluster.move(1, "none")
        cluster.kill("h1")
        give_up(caller, "h1")
        wait_until(lambda: "node h1 did not answer" in caller.orchestrator.health()[1].last_death)
        ends = caller.wait(4)
        assert texts(ends.pop(text)) == ["text>a"]
        # Nobody knows when they could be tried again.
        assert ends.keys() == set(at_b) and {type(error_of(end)) for end in ends.values()} == {StageDeadError}
        wait_until(lambda: caller.orchestrator.health()[1].waits_for == "a node")
        waiting = caller.submit("waits")
        cluster.move(1, "h2")
        assert texts(caller.wait(1)[waiting])[1].endswith(">b>c")
        assert is_ready(caller)
        assert [(stage.node, stage.waits_for) for stage in caller.orchestrator.health()] == [
            ("", ""), ("h2", ""), ("h2", "")
        ]  # fmt: skip


def test_a_stage_that_does_not_fit_its_machine_is_an_error_that_names_it() -> None:
    cluster = LoopbackCluster("", "h1", "")
    try:
        with running(cluster, TRIANGLE[0], TRIANGLE[1] | {"runtime": {"cpus": "4000"}}, TRIANGLE[2]):
            raise AssertionError("it must not start")
    except StageStartError as error:
        assert "stage 1 (b)" in str(error) and "runtime.cpus names 4000" in str(error) and "h1" in str(error)


def test_a_start_that_waits_for_a_machine_can_be_closed() -> None:
    orchestrator = open_orchestrator(make_config(*TRIANGLE), cluster=LoopbackCluster("", "none", ""))
    orchestrator.close()
    with pytest.raises(PipelineClosedError, match="while it started"):
        orchestrator.wait_until_started()


def test_a_start_that_waits_for_a_server_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_started = threading.Event()
    cluster = LoopbackCluster("", "h1", "")
    monkeypatch.setattr(cluster, "start_server", lambda *_: is_started.set())  # It never connects.
    orchestrator = open_orchestrator(make_config(*TRIANGLE), cluster=cluster)
    is_started.wait()
    orchestrator.close()
    with pytest.raises(PipelineClosedError, match="while it started"):
        orchestrator.wait_until_started()


def test_a_pipeline_that_waits_for_a_machine_can_be_closed() -> None:
    cluster = LoopbackCluster("", "h1", "")
    with running(cluster, restart={"backoff_s": 0.01}) as caller:
        cluster.move(1, "none")
        cluster.kill("h1")
        give_up(caller, "h1")
        wait_until(lambda: caller.orchestrator.health()[1].waits_for == "a node")
        assert state_of(caller.orchestrator)["b"] == "restarting"
