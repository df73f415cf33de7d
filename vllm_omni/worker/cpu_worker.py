# SPDX-License-Identifier: Apache-2.0
"""The workers and model runners on the CPU: those of the GPU, over vLLM's CPU worker and runner."""

import contextlib
import ctypes
import glob
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_omni.errors import StageConfigError
from vllm_omni.vllm_versions import CPULoRARunner
from vllm_omni.worker.cpu_graphs import CPUGraphs
from vllm_omni.worker.cpu_int8_weights import CPUInt8Weights
from vllm_omni.worker.cpu_kernels import use_cpu_kernels
from vllm_omni.worker.cpu_sampler import CPUSampler
from vllm_omni.worker.feedback_ar_model_runner import FeedbackARModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.gpu_worker import GPUARWorker, GPUGenerationWorker, OmniGPUWorker

_PR_SET_TIMERSLACK = 29
_SLACK_NS = 200_000_000


class CPUIdleGenerators(GPUModelRunner):
    """A base after our runner and before vLLM's."""

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:  # type: ignore[override]
        """Removes the generators of requests that do not sample in this step, and puts them back after it.

        vLLM draws for them too and then resets their generators, which a CPU generator does not support: a request
        with a seed and a chunked prefill would raise, and fail the step for its whole batch.
        """
        sample_tokens: Any = super().sample_tokens  # its decorator hides the type
        generators = self.input_batch.generators
        if self.execute_model_state is None or not generators:
            return sample_tokens(grammar_output)
        idle = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        removed = {index: generators.pop(index) for index in idle if index in generators}
        try:
            return sample_tokens(grammar_output)
        finally:
            generators.update(removed)


class CPULoRA(CPULoRARunner):
    """A base of the runners of stages that can have adapters."""

    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> nn.Module:
        if vllm_config.model_config.is_moe:
            raise StageConfigError(
                "enable_lora: vLLM has no CPU kernels for LoRA on a mixture of experts; set enable_lora to false"
            )
        return super().load_lora_model(model, vllm_config, device)


class CPUKVCache(CPUModelRunner):
    """A base of our runners, whose KV cache takes memory when it is written to.

    vLLM's is filled with zeros at the start, so that a stage takes all of its `kv_cache_memory_bytes` before its first
    request. The memory of a new mapping is zero already, and the system supplies each page at the first write.
    """

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        with UnwrittenZeros():
            return super().initialize_kv_cache_tensors(*args, **kwargs)


class UnwrittenZeros(TorchFunctionMode):
    """Inside, int8 zeros `[n]` on a CPU are a mapping of their own; all else is as without it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_flat = func is torch.zeros and [type(arg) for arg in args] == [int] and args[0] > 0
        if is_flat and kwargs == {"dtype": torch.int8, "device": torch.device("cpu")}:
            mapping = mmap.mmap(-1, args[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(mapping, dtype=torch.int8)  # It keeps the mapping.
        return func(*args, **kwargs or {})


class CPUARModelRunner(GPUARModelRunner, CPUIdleGenerators, CPULoRA, CPUGraphs, CPUInt8Weights, CPUKVCache, CPUSampler):
    pass


class CPUFeedbackARModelRunner(FeedbackARModelRunner, CPUIdleGenerators, CPUInt8Weights, CPUKVCache, CPUSampler):
    pass


class CPUGenerationModelRunner(GPUGenerationModelRunner, CPUInt8Weights, CPUKVCache):
    pass


class OmniCPUWorker(OmniGPUWorker, CPUWorker):
    """vLLM's CPU worker with one of our runners."""

    def init_device(self) -> None:
        # vLLM's CPU worker has no hook for its runner, so the one it made, which holds no weights yet, is replaced.
        with long_timer_slack():
            super().init_device()
        _unlink_shared_memory()
        use_cpu_kernels(self.vllm_config)
        self.model_runner = self._make_model_runner()  # type: ignore[assignment]


class CPUARWorker(OmniCPUWorker, GPUARWorker):
    omni_runner_cls = CPUARModelRunner
    feedback_runner_cls = CPUFeedbackARModelRunner


class CPUGenerationWorker(OmniCPUWorker, GPUGenerationWorker):
    omni_runner_cls = CPUGenerationModelRunner


@contextlib.contextmanager
def long_timer_slack() -> Iterator[None]:
    """Timeouts of the threads that are started inside may expire 0.2 s late; other waits are not affected.

    vLLM creates a dozen gloo groups for an engine, also for a world of one process, and each has a thread that checks
    every 10 ms whether the group has ended. In an idle pipeline of three stages these threads alone would take several
    percent of a core. In return a group takes up to 0.2 s longer to end. Not for a GPU: threads that its libraries
    start would be late too.
    """
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS))  # of this thread; threads that it starts inherit it
    try:
        yield
    finally:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0))  # back to the default


def _unlink_shared_memory() -> None:
    """Removes the names of the memory that the workers of an engine share, where the processor has AVX-512.

    All workers of a group have mapped it, so the names have no use any more. The kernel releases the memory when
    they have ended, killed ones too, which leave it in /dev/shm otherwise.
    """
    for group in (get_tp_group(), get_pp_group()):
        communicator = group.device_communicator
        if isinstance(communicator, CpuCommunicator) and isinstance(communicator.dist_module, _CPUSHMDistributed):
            for path in Path("/dev/shm").glob(f"{glob.escape(communicator.dist_module.group_name)}*"):
                path.unlink(missing_ok=True)  # Another worker of the group does so, too.
