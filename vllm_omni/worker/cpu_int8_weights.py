# SPDX-License-Identifier: Apache-2.0
"""`quantization: int8`: weights in 8 bits on a CPU, for any vLLM stage, without calibration.

A step that computes few rows takes as long as it takes to read the weights. Here the linear layers keep int8 with a
scale for each output, which are made of each layer as soon as the checkpoint is loaded, and multiply in bfloat16
(`torch._weight_int8pack_mm`). Activations are not quantized. Many rows, such as those of a prompt, take longer to
compute than weights to read: they multiply with the same weights in the model's dtype, converted for this one product.
Embeddings and heads stay as they are without it: in 8 bits the head takes as long. So do experts.
"""

from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_omni.engine.engine_args import INT8, OmniEngineSettings
from vllm_omni.errors import StageConfigError
from vllm_omni.worker.cpu_half_weights import CPUHalfWeights, HalfWeightsConfig

logger = init_logger(__name__)

_LARGEST = 127
"""The range is symmetric: nothing becomes -128."""
_MULTIPLE = 32
"""Of inputs and outputs that torch's kernel computes at once."""
_MANY_ROWS = 48
"""From here on converting the weights is faster than torch's kernel, by a factor of two at 128 (AVX-512, one core)."""


class CPUInt8Weights(CPUHalfWeights):
    """A base of our runners."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if not OmniEngineSettings.from_vllm_config(self.vllm_config).has_int8_weights:
            super().load_model(*args, **kwargs)
            return
        config = self.vllm_config.model_config
        if self.vllm_config.quant_config is not None:
            raise StageConfigError(f"quantization: the checkpoint has {config.quantization}; remove {INT8}")
        if config.dtype not in Int8WeightsConfig().get_supported_act_dtypes():
            raise StageConfigError(f"quantization: {INT8} needs dtype float32 or bfloat16, not {config.dtype}")
        self.vllm_config.quant_config = Int8WeightsConfig()
        super().load_model(*args, **kwargs)
        check_int8(self.model)


class Int8WeightsConfig(HalfWeightsConfig):
    """Packs linear layers; all others are computed as without it."""

    def get_name(self) -> str:  # type: ignore[override]  # Not one of vLLM's.
        return "int8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return super().get_quant_method(layer, prefix)
        method = Int8LinearMethod()
        method.prefix = prefix
        return method


class Int8LinearMethod(UnquantizedLinearMethod):
    """A linear layer with weights in int8.

    Attributes:
        prefix: Its name, for the log.
    """

    prefix = ""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        if weight.is_meta or getattr(layer, "_cpu_skip_gemm_dispatch", False):  # vLLM reads these weights itself.
            super().process_weights_after_loading(layer)
            return
        if any(size % _MULTIPLE for size in weight.shape):
            text = "%s %s stays in float: int8 needs sizes that are multiples of %d"
            logger.info(text, self.prefix, list(weight.shape), _MULTIPLE)
            super().process_weights_after_loading(layer)
            return
        rounded, scales = quantize(weight.detach())

        # vLLM calls it with the layer's weights, which are empty.
        def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1])
            if len(rows) < _MANY_ROWS:
                product = torch._weight_int8pack_mm(rows.to(torch.bfloat16), rounded, scales).to(x.dtype)
            else:
                product = nn.functional.linear(rows, rounded.to(x.dtype)).mul_(scales)
            product = product.view(*x.shape[:-1], len(scales))
            return product if bias is None else product.add_(bias)

        layer.cpu_linear = cpu_linear  # type: ignore[assignment]  # vLLM's name for it
        layer.has_int8_weights = True  # type: ignore[assignment]
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def check_int8(model: nn.Module) -> None:
    """Logs how much of a loaded model stays in float.

    Raises:
        StageConfigError: All of it.
    """
    count = sum(getattr(layer, "has_int8_weights", False) for layer in model.modules())
    if not count:
        raise StageConfigError(f"quantization: no layer of the model can have {INT8} weights; remove it")
    left = sum(parameter.nbytes for parameter in model.parameters())
    logger.info("%d layers have int8 weights; %.1f MiB of other weights stay in float", count, left / (1 << 20))


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
