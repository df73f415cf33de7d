# SPDX-License-Identifier: Apache-2.0
"""Pipelines on a Ray cluster of three nodes, all on this machine: what Ray decides, and what follows from it."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.launch.test_cluster import give_up
from tests.orchestrator.pipelines import TRIANGLE, Caller, make_config, opened, texts
from tests.orchestrator.test_failure import is_ready, wait_until
from vllm_omni.entrypoints.pipeline import open_cluster
from vllm_omni.errors import PipelineStartError, StageConfigError
from vllm_omni.launch import nodes

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

GROUP = "machines"
pytestmark = pytest.mark.slow
MARK = "VLLM_OMNI_TEST_CLUSTER"  # in the environment of every process that a node of this cluster starts
STAGE_TITLES = [f"vllm_omni::{name}" for name in ("a", "b", "c")]
QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}
"""A node that was killed refuses connections at once; one that a busy machine does not run is not lost."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `test_cluster`."""
    monkeypatch.setattr(nodes, "NODE_TIMEOUT_S", 60.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """h1, the driver's node, and h2 and h3; the last two have the resource `spare`."""
    with running_cluster() as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MARK, str(os.getpid()))
            cluster.add_node(num_cpus=1, resources={"h1": 1}, _system_config=QUICK_HEALTH_CHECKS)
            for name in ("h2", "h3"):
                cluster.add_node(num_cpus=2, resources={name: 1, "spare": 1})
        join(cluster)
        yield cluster


@contextlib.contextmanager
def running_cluster() -> Iterator[Any]:
    """A cluster without nodes; ends with the context."""
    cluster = cluster_utils.Cluster()
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def join(cluster: Any) -> None:
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="ERROR")


def stages(*resources: dict[str, float]) -> list[dict]:
    return [stage | {"runtime": {"resources": own}} for stage, own in zip(TRIANGLE, resources, strict=True)]


def running(*resources: dict[str, float], **runtime: Any) -> contextlib.AbstractContextManager[Caller]:
    config = make_config(*stages(*resources), distributed_backend="ray", **runtime)
    return opened(config, cluster=open_cluster(config, 60))


def test_stages_are_where_their_resources_are(cluster: Any) -> None:
    before = ray.available_resources()
    with running({"h1": 0.1, "CPU": 0.1}, {"h2": 0.1}, {"h3": 0.1}) as caller:
        for size in (0, 3_000_000):
            caller.submit(f"p{size}", fake_bytes=size)
            assert texts(caller.wait_one()) == [f"p{size}>a", f"p{size}>a+p{size}>a>b>c"]
        assert len({stage.pid for stage in stage_processes()}) == 3  # one of this process, on its node
    wait_until(lambda: not stage_processes())
    wait_until(lambda: ray.available_resources() == before)


def stage_processes() -> list[psutil.Process]:
    """Of this cluster: other tests of this machine run stages at the same time."""
    servers = [process for process in psutil.process_iter() if is_our_server(process)]
    found = []
    for server in (psutil.Process(), *servers):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child for child in server.children(recursive=True) if title(child) in STAGE_TITLES]
    return found


def is_our_server(process: psutil.Process) -> bool:
    try:
        is_server = "vllm_omni.launch.node_server" in process.cmdline()
        return is_server and process.environ().get(MARK) == str(os.getpid())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()).strip()
    return ""


def test_what_does_not_fit_is_one_error_with_what_there_is(cluster: Any) -> None:
    config = make_config(*stages({}, {"fast_disk": 2}, {}), distributed_backend="ray")
    with pytest.raises(PipelineStartError) as error:
        open_cluster(config, 5)
    text = str(error.value)
    assert "stage 1 (b) fits on no node" in text and "stage 1 (b): CPU 1, fast_disk 2" in text
    assert "CPU 2, h2 1, spare 1 (free: CPU 2, h2 1, spare 1)" in text
    config = make_config(*stages({"CPU": 2}, {"CPU": 2}, {"CPU": 2}), distributed_backend="ray")
    with pytest.raises(PipelineStartError, match="together do not fit"):
        open_cluster(config, 5)


def test_resources_in_use_are_waited_for(cluster: Any) -> None:
    config = make_config(*stages({"h1": 0.1, "CPU": 0}, {"h2": 1}, {"h3": 1}), distributed_backend="ray")
    first = open_cluster(config, 60)
    with pytest.raises(PipelineStartError, match="not free within 1 s"):
        open_cluster(config, 1)
    first.close()
    open_cluster(config, 60).close()


def test_a_node_that_does_not_exist_is_an_error(cluster: Any) -> None:
    stage = TRIANGLE[0] | {"runtime": {"node": "10.9.9.9"}}
    with pytest.raises(StageConfigError, match=r"stage 0 \(a\): runtime.node: the Ray cluster has no node '10.9.9.9'"):
        open_cluster(make_config(stage, *TRIANGLE[1:], distributed_backend="ray"), 5)


def test_stages_of_a_dead_node_start_on_another(cluster: Any) -> None:
    with running({"h1": 0.1, "CPU": 0.1}, {"spare": 1}, {"h1": 0.1, "CPU": 0.1}, restart={"backoff_s": 0.1}) as caller:
        caller.submit("before")
        assert texts(caller.wait_one())
        node = next(node for node in cluster.worker_nodes if not node_is_free(node))
        cluster.remove_node(node, allow_graceful=False)
        give_up(caller, node.node_id)
        wait_until(lambda: not is_ready(caller))
        caller.submit("after")
        assert texts(caller.wait_one()) == ["after>a", "after>a+after>a>b>c"]


def node_is_free(node: Any) -> bool:
    free = ray._private.state.available_resources_per_node()
    return free[node.node_id].get("spare") == 1
