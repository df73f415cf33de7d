# SPDX-License-Identifier: Apache-2.0
"""LoRA and threads on a CPU: rows without an adapter are unchanged; gloo's threads wake up rarely."""

import ctypes
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationMode
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni import vllm_versions
from vllm_omni.vllm_versions.v0_32.workers import OmniPunicaWrapperCPU
from vllm_omni.worker import cpu_worker
from vllm_omni.worker.cpu_worker import CPUARWorker, long_timer_slack
from vllm_omni.worker.gpu_worker import GPUARWorker, GPUGenerationWorker

INDICES = torch.tensor([0, -1, 1, -1])
WITHOUT = INDICES < 0


def add(is_ours: bool, is_prefill: bool) -> torch.Tensor:
    """What two adapters of rank 2 add to four rows of 3."""
    wrapper = PunicaWrapperCPU(8, 8, "cpu")
    wrapper.indices_len[:2] = [4, 4]
    wrapper._token_lora_indices[:4] = INDICES
    wrapper._sampler_indices[:4] = INDICES
    wrapper.is_prefill = is_prefill
    if is_prefill:
        wrapper._update_prefill_metadata(INDICES)
    if is_ours:
        OmniPunicaWrapperCPU.adopt(wrapper)
    torch.manual_seed(0)
    y, x, a, b = torch.zeros(4, 3), torch.randn(4, 5), torch.randn(2, 1, 2, 5), torch.randn(2, 1, 3, 2)
    wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (3,))
    logits = torch.zeros(4, 3)
    wrapper.add_lora_logits(logits, x, a, b, 1.0)
    torch.testing.assert_close(logits, y)
    return y


@pytest.mark.parametrize("is_prefill", [True, False])
def test_only_rows_with_an_adapter_get_one(is_prefill: bool) -> None:
    is_needed = vllm_versions.folder() == "v0_32"
    ours, theirs = add(is_needed, is_prefill), add(False, is_prefill)
    assert ours[WITHOUT].eq(0).all() and ours[~WITHOUT].ne(0).all()
    torch.testing.assert_close(ours[~WITHOUT], theirs[~WITHOUT])
    assert theirs[WITHOUT].ne(0).any() == is_needed, "vLLM leaves them out now: OmniPunicaWrapperCPU is not needed"


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a timer slack")
PR_GET_TIMERSLACK = 30


def slack_ns() -> int:
    return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK)


def slack_ns_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(slack_ns()))
    thread.start()
    thread.join()
    return found[0]


@linux_only
def test_only_threads_started_inside_have_the_long_slack() -> None:
    before = slack_ns()
    with long_timer_slack():
        assert slack_ns_of_a_new_thread() == 200_000_000
    assert slack_ns() == before == slack_ns_of_a_new_thread()


@linux_only
def test_the_caller_s_slack_is_restored_after_an_error() -> None:
    before = slack_ns()
    with pytest.raises(ValueError), long_timer_slack():
        raise ValueError
    assert slack_ns() == before


@linux_only
@pytest.mark.parametrize("worker_class", [GPUARWorker, GPUGenerationWorker, CPUARWorker])
def test_threads_of_a_gpus_libraries_keep_their_slack(
    worker_class: type[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, found = slack_ns(), []

    def init_device(worker: Worker) -> None:
        worker.device = torch.device("cpu")
        found.append(slack_ns_of_a_new_thread())

    for base in (Worker, CPUWorker):
        monkeypatch.setattr(base, "init_device", init_device)
    monkeypatch.setattr(worker_class, "_make_model_runner", lambda worker: None)
    monkeypatch.setattr(cpu_worker, "_unlink_shared_memory", lambda: None)  # There are no groups.
    worker = object.__new__(worker_class)
    compilation = SimpleNamespace(mode=CompilationMode.VLLM_COMPILE)
    worker.vllm_config = SimpleNamespace(additional_config={}, compilation_config=compilation)  # type: ignore[assignment]
    worker.init_device()
    assert found == [200_000_000 if issubclass(worker_class, CPUWorker) else before]
