# SPDX-License-Identifier: Apache-2.0
"""Workers and model runners."""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

__all__ = ["CPULoRARunner"]


class OmniPunicaWrapperCPU(PunicaWrapperCPU):
    """LoRA on the CPU where a request has no adapter.

    vLLM marks the rows of such a request with the index -1. Its kernels for accelerators skip them; those for the CPU
    read -1 as the last adapter. An adapter's result is linear in its input, so zeros in these rows add nothing.

    The class holds no state of its own: vLLM builds its own class, and `adopt` turns the instance into this one.
    """

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


class CPULoRARunner(CPUModelRunner):
    """Has LoRA leave out the rows of requests without an adapter."""

    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> nn.Module:
        model = super().load_lora_model(model, vllm_config, device)
        for wrapper in self.lora_manager._adapter_manager.punica_wrapper_mapping.values():
            OmniPunicaWrapperCPU.adopt(wrapper)
        return model


def _with_adapter(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`[num_rows, ...]`, zero where a row's index is that of no adapter."""
    return rows.masked_fill((indices < 0)[:, None], 0)
