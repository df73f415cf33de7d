# SPDX-License-Identifier: Apache-2.0
"""Our workers on a GPU, tested on machines without one by their calls of torch and of vLLM's workers."""

import queue
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.gpu_worker import GPUARWorker, GPUGenerationWorker, is_device_broken


class InThisThread(WorkerProc, MultiprocExecutor):
    """vLLM's executor for several devices and the process of its one worker, both of them here.

    The methods that make requests and replies are vLLM's; the queues between the two are Python's.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.rank = 0
        self.vllm_config: Any = SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=False))
        self.use_async_scheduling = False
        self.is_failed = False
        self.futures_queue = deque()
        replies: Any = queue.Queue()
        self.worker_response_mq: Any = SimpleNamespace(enqueue=replies.put)
        self.response_mqs: Any = [SimpleNamespace(dequeue=replies.get)]
        self.rpc_broadcast_mq: Any = SimpleNamespace(enqueue=self._execute_worker_rpc)


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLt"), False),
        (ValueError("bad input"), False),
    ],
)
@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_a_broken_device_is_recognized_behind_vllms_executor(
    method: str, error: Exception, is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(Worker, method, fail)
    executor = InThisThread(object.__new__(GPUARWorker))
    with pytest.raises(RuntimeError, match="Worker failed with error") as raised:
        executor.collective_rpc(method, args=(None,))
    assert not isinstance(raised.value, torch.AcceleratorError), "vLLM passes classes on now: the text can go"
    assert is_device_broken(raised.value) == is_broken
    assert str(error) in str(raised.value)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, torch.device]]:
    """The process's limit of a device's memory, as passed to torch."""
    limits: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    return limits


def init(worker_class: type[Worker], device: str, monkeypatch: pytest.MonkeyPatch, **additional: Any) -> None:
    worker = object.__new__(worker_class)
    worker.vllm_config = SimpleNamespace(additional_config=additional)  # type: ignore[assignment]
    worker.cache_config = SimpleNamespace(gpu_memory_utilization=0.1)  # type: ignore[assignment]
    monkeypatch.setattr(Worker, "init_device", lambda worker: setattr(worker, "device", torch.device(device)))
    worker.init_device()


def test_a_one_step_stage_is_limited_to_its_memory(limits: Any, monkeypatch: Any) -> None:
    init(GPUGenerationWorker, "cuda:1", monkeypatch)
    assert limits == [(0.1, torch.device("cuda:1"))]


def test_stages_with_a_kv_cache_and_those_on_a_cpu_are_not_limited(limits: Any, monkeypatch: Any) -> None:
    init(GPUARWorker, "cuda:0", monkeypatch)
    init(GPUGenerationWorker, "cpu", monkeypatch)
    assert limits == []
