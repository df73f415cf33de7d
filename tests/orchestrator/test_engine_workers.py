# SPDX-License-Identifier: Apache-2.0
"""Stages whose engines have several workers: on this machine, and on several nodes of a Ray cluster.

vLLM's CPU platform has no devices that Ray could count. Here all processes have one that calls them GPUs, added in the
way that vLLM has for platforms of others; everything else is real.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm.platforms import current_platform

from tests.entrypoints.test_weight_updates import Tokens, generate, update
from tests.launch.test_ray import QUICK_HEALTH_CHECKS, join, running_cluster
from tests.orchestrator.test_failure import wait_until
from tests.servers import import_path
from vllm_omni import OmniLLM
from vllm_omni.errors import PipelineStartError, StageConfigError
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

ray = pytest.importorskip("ray")

GROUP = "machines"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # Each test starts several engines.
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class CpuPlatformWithDevices(CpuPlatform):
    ray_device_key = "GPU"

def find():
    return "platform_with_devices.CpuPlatformWithDevices"
"""
ENTRY_POINTS = "[vllm.platform_plugins]\nwith_devices = platform_with_devices:find\n"
METADATA = "Metadata-Version: 2.1\nName: platform-with-devices\nVersion: 0\n"
WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
PARAMS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
MEMORY = Path("/dev/shm")
PROMPTS = ["The red river", "Look at the dog", "Two cats"]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("platform")
    (folder / "platform_with_devices.py").write_text(PLATFORM)
    info = folder / "platform_with_devices-0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info / "METADATA").write_text(METADATA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", import_path(folder))
        patch.setattr(type(current_platform), "ray_device_key", "GPU")  # this process knows its platform already
        yield


@pytest.fixture(scope="module")
def cluster(platform: None) -> Iterator[Any]:
    """h1, the driver's node, and two nodes with a device each."""
    with running_cluster() as cluster:
        cluster.add_node(num_cpus=1, num_gpus=0, resources={"h1": 1}, _system_config=QUICK_HEALTH_CHECKS)
        for name in ("h2", "h3"):
            cluster.add_node(num_cpus=1, num_gpus=1, resources={name: 1})
        join(cluster)
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def memory_of_killed_workers() -> Iterator[None]:
    """Removes the shared memory of Python's that the workers of a killed node leave."""
    before = set(MEMORY.glob("psm_*"))
    yield
    for segment in set(MEMORY.glob("psm_*")) - before:
        segment.unlink()


def open_llm(model: Path, **options: Any) -> OmniLLM:
    limits = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}  # of each worker
    return OmniLLM(str(model), dtype="float32", enforce_eager=True, **limits, **options)


def tokens_of(llm: OmniLLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def nodes_of_actors(name: str) -> set[str]:
    """The nodes of all actors that run and have this in their class or name."""
    actors = ray._private.state.actors().values()
    alive = [actor for actor in actors if actor["State"] == "ALIVE"]
    return {actor["Address"]["NodeID"] for actor in alive if name in actor["ActorClassName"] + actor["Name"]}


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("weights") / "new", seed=1)


@pytest.fixture(scope="module")
def one_worker(tiny_qwen3: Path, new_weights: Path) -> tuple[list[list[int]], Tokens]:
    """The tokens of one worker, and what it generates with the new weights."""
    with open_llm(tiny_qwen3) as llm:
        tokens = tokens_of(llm)
        update(llm, new_weights, "step-1")
        return tokens, generate(llm)[0]


@pytest.fixture
def expected(one_worker: tuple[list[list[int]], Tokens]) -> list[list[int]]:
    return one_worker[0]


def test_each_worker_gets_new_weights_and_one_that_is_lost_is_replaced(
    tiny_qwen3: Path,
    one_worker: tuple[list[list[int]], Tokens],
    new_weights: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else vLLM wants a NUMA node for each
    expected, new = one_worker

    def check_new_weights() -> None:
        found, versions = generate(llm)
        assert versions == {"step-1"} and [tokens for tokens, _ in found] == [tokens for tokens, _ in new]
        assert [it for _, it in found] == pytest.approx([it for _, it in new], abs=1e-4)

    with open_llm(tiny_qwen3, tensor_parallel_size=2) as llm:
        assert tokens_of(llm) == expected
        assert not list(MEMORY.glob("*-cpushm_*"))  # vLLM's, where the processor has AVX-512
        before = generate(llm)
        update(llm, new_weights, "step-1")
        check_new_weights()
        children = psutil.Process().children(recursive=True)
        next(child for child in children if "Worker_TP1" in " ".join(child.cmdline())).kill()
        wait_until(lambda: "a worker of its engine ended" in llm.health()[0].last_death)
        wait_until(lambda: llm.health()[0].state == "ready")
        check_new_weights()
        update(llm, tiny_qwen3, "default")
        assert generate(llm) == before and tokens_of(llm) == expected


def test_what_cannot_be_placed_is_refused(cluster: Any, tiny_qwen3: Path) -> None:
    with pytest.raises(PipelineStartError, match=r"stage 0 \(text\): 3 times CPU 1, GPU 1"):
        open_llm(tiny_qwen3, distributed_backend="ray", **WORKERS | {"tensor_parallel_size": 3})
    with pytest.raises(StageConfigError, match="Ray chooses the devices of its workers"):
        open_llm(tiny_qwen3, distributed_backend="ray", stage_overrides={0: {"runtime": {"devices": "0,1"}}}, **WORKERS)


def test_a_stage_spans_nodes_and_survives_the_death_of_one(
    cluster: Any, tiny_qwen3: Path, expected: list[list[int]]
) -> None:
    with open_llm(tiny_qwen3, distributed_backend="ray", **WORKERS) as llm:
        assert tokens_of(llm) == expected
        assert len(nodes_of_actors("RayWorkerProc")) == 2
        (lost,) = nodes_of_actors("RayWorkerProc") - nodes_of_actors("StageHost")  # not that of the stage's process
        cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == lost))
        wait_until(lambda: llm.health()[0].last_death != "")
        assert "a worker of its engine ended" in llm.health()[0].last_death
        wait_until(lambda: "2 times CPU 1, GPU 1" in llm.health()[0].waits_for)
        cluster.add_node(num_cpus=1, num_gpus=1, resources={"h4": 1})
        assert tokens_of(llm) == expected  # after the stage has started again
    wait_until(lambda: not nodes_of_actors("RayWorkerProc"))
