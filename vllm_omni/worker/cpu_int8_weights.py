# SPDX-License-Identifier: Apache-2.0
"""`quantization: int8`: weights in 8 bits on a CPU, for any vLLM stage, without calibration.

A step that computes few rows takes as long as it takes to read the weights. Here the linear layers keep int8 with a
scale for each output, which are made of each layer as soon as the checkpoint is loaded, and multiply in bfloat16
(`torch._weight_int8pack_mm`). Activations are not quantized. Embeddings and heads stay as they are without it: in 8
bits the head takes as long.
"""

from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_omni.worker.cpu_half_weights import HalfWeightsConfig

logger = init_logger(__name__)

_LARGEST = 127
"""The range is symmetric: nothing becomes -128."""
_MULTIPLE = 32
"""Of inputs and outputs that torch's kernel computes at once."""


class Int8WeightsConfig(HalfWeightsConfig):
    """Packs linear layers; all others are computed as without it."""

    def get_name(self) -> str:  # type: ignore[override]  # Not one of vLLM's.
        return "int8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return Int8LinearMethod(prefix) if isinstance(layer, LinearBase) else super().get_quant_method(layer, prefix)


class Int8LinearMethod(UnquantizedLinearMethod):
    """A linear layer with weights in int8.

    Args:
        prefix: Its name, for the log.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        if weight.is_meta or getattr(layer, "_cpu_skip_gemm_dispatch", False):  # vLLM reads these weights itself.
            super().process_weights_after_loading(layer)
            return
        if any(size % _MULTIPLE for size in weight.shape):
            text = "%s %s stays in float: int8 needs sizes that are multiples of %d"
            logger.info(text, self._prefix, list(weight.shape), _MULTIPLE)
            super().process_weights_after_loading(layer)
            return
        rounded, scales = quantize(weight.detach())

        def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
            product = torch._weight_int8pack_mm(rows, rounded, scales).to(x.dtype).view(*x.shape[:-1], len(scales))
            return product if bias is None else product.add_(bias)

        layer.cpu_linear = cpu_linear
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
        weight: Floats `[outputs, inputs]`.

    Returns:
        Int8 of the same shape, and bfloat16 scales `[outputs]`, whose product is nearest to the weight.
    """
    weight = weight.float()
    smallest = torch.finfo(torch.bfloat16).tiny  # Of an output whose weights are zero.
    scales = (weight.abs().amax(dim=1) / _LARGEST).clamp_(min=smallest).to(torch.bfloat16)
    rounded = (weight / scales.float()[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
    return rounded.to(torch.int8), scales
