# SPDX-License-Identifier: Apache-2.0
"""LoRA on the CPU: a request without an adapter gets none.

vLLM marks its rows with the index -1, which its kernels for accelerators leave out; those for the CPU take it for the
last adapter. What an adapter adds is linear in its input, so zeros in these rows add nothing.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_omni.errors import StageConfigError


class OmniPunicaWrapperCPU(PunicaWrapperCPU):
    """Holds no state of its own: vLLM builds its own class, and `adopt` turns it into this one."""

    @classmethod
    def adopt(cls, wrapper: Any) -> None:
        assert isinstance(wrapper, PunicaWrapperCPU), f"{type(wrapper).__name__} is not the CPU's"
        wrapper.__class__ = cls

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_linear(y, _with_adapter(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_embedding(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_embedding(y, _with_adapter(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_logits(y, _with_adapter(x, self.sampler_indices), *args, **kwargs)


class CPULoRA(CPUModelRunner):
    """Part of the runners of stages that may have adapters."""

    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> nn.Module:
        if vllm_config.model_config.is_moe:
            raise StageConfigError("enable_lora: vLLM has no kernels for LoRA on a mixture of experts on a CPU")
        model = super().load_lora_model(model, vllm_config, device)
        for wrapper in self.lora_manager._adapter_manager.punica_wrapper_mapping.values():
            OmniPunicaWrapperCPU.adopt(wrapper)
        return model


def _with_adapter(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`[num_rows, ...]`, zero where a row's index says that it has no adapter."""
    return rows.masked_fill((indices < 0)[:, None], 0)
