# SPDX-License-Identifier: Apache-2.0
"""`quantization: int8`: weights in 8 bits on a CPU, for any vLLM stage, without calibration.

A step that computes few rows takes as long as it takes to read the weights. Here the linear layers keep int8 with a
scale for each output, which are made of each layer as soon as the checkpoint is loaded. Where the processor multiplies
int8 (VNNI, AMX) rows are sums of two rows of int8, which keeps 15 bits of them, and the head is in 8 bits, too.

Elsewhere rows are bfloat16 (`torch._weight_int8pack_mm`). There many rows, such as those of a prompt, take longer to
compute than weights to read: they multiply with the same weights in the model's dtype, converted for this one product,
and the head stays as it is without int8. Embeddings and experts always do.

`quantization: auto` is int8 where the processor multiplies it, for models that can have it, and nothing elsewhere.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_omni.engine.engine_args import HAS_INT8_PRODUCTS, INT8, OmniEngineSettings
from vllm_omni.errors import StageConfigError
from vllm_omni.worker.cpu_half_weights import CPUHalfWeights, HalfWeightsConfig

logger = init_logger(__name__)

_LARGEST = 127
"""The range is symmetric: nothing becomes -128."""
_MULTIPLE = 32
"""Of inputs and outputs that torch's kernel computes at once."""
_FEW_ROWS = 16
"""For products of up to so many, memory is kept."""
_MANY_ROWS = 48
"""From here on converting the weights is faster than torch's kernel, by a factor of two at 128 (AVX-512, one core)."""


class CPUInt8Weights(CPUHalfWeights):
    """A base of our runners."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        chosen = OmniEngineSettings.from_vllm_config(self.vllm_config).int8_weights
        problem = _problem(self.vllm_config)
        if chosen == INT8 and problem is not None:
            raise StageConfigError(f"quantization: {problem}")
        if chosen is None or problem is not None:
            super().load_model(*args, **kwargs)
            return
        self.vllm_config.quant_config = Int8WeightsConfig()
        super().load_model(*args, **kwargs)
        check_int8(self.model, is_required=chosen == INT8)


def _problem(config: VllmConfig) -> str | None:
    """Why the linear layers of a model cannot have int8 weights."""
    model = config.model_config
    if config.quant_config is not None:
        return f"the checkpoint has {model.quantization}; remove {INT8}"
    if model.dtype not in Int8WeightsConfig().get_supported_act_dtypes():
        return f"{INT8} needs dtype float32 or bfloat16, not {model.dtype}"
    return None


class Int8WeightsConfig(HalfWeightsConfig):
    """Packs linear layers; all others are computed as without it."""

    def get_name(self) -> str:  # type: ignore[override]  # Not one of vLLM's.
        return "int8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, ParallelLMHead) and HAS_INT8_PRODUCTS:
            return Int8HeadMethod()
        if not isinstance(layer, LinearBase):
            return super().get_quant_method(layer, prefix)
        method = Int8LinearMethod()
        method.prefix = prefix
        return method


class Int8HeadMethod(UnquantizedEmbeddingMethod):
    """A head; the embedding that it may share its weights with keeps them."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        if weight.is_meta:
            super().process_weights_after_loading(layer)
            return
        layer.cpu_linear = _as_linear(TwoTermProduct(*quantize(weight.detach())))  # type: ignore[assignment]


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
        product = TwoTermProduct if HAS_INT8_PRODUCTS else RoundedRowsProduct
        layer.cpu_linear = _as_linear(product(*quantize(weight.detach())))  # type: ignore[assignment]
        layer.has_int8_weights = True  # type: ignore[assignment]
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def _as_linear(multiply: "RoundedRowsProduct | TwoTermProduct") -> Callable[..., torch.Tensor]:
    """What vLLM calls as the layer's `cpu_linear`, with the weights of the layer, which it does not use."""

    def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = multiply(x.reshape(-1, x.shape[-1])).to(x.dtype)
        product = rows.view(*x.shape[:-1], rows.shape[1])
        return product if bias is None else product.add_(bias)

    return cpu_linear


class RoundedRowsProduct:
    """Rows in bfloat16, of which many are multiplied with the weights in their own type, converted for this product."""

    def __init__(self, rounded: torch.Tensor, scales: torch.Tensor) -> None:
        self._rounded, self._scales = rounded, scales

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) < _MANY_ROWS:
            return torch._weight_int8pack_mm(rows.to(torch.bfloat16), self._rounded, self._scales)
        return nn.functional.linear(rows, self._rounded.to(rows.dtype)).mul_(self._scales)


@functools.cache
def _buffers(width: int, outputs: int) -> tuple[torch.Tensor, ...]:
    """What products of few rows of one size compute with, one after the other."""
    return _make_buffers(width, outputs, _FEW_ROWS)


def _make_buffers(width: int, outputs: int, number: int) -> tuple[torch.Tensor, ...]:
    """Terms, their scales, what the first terms leave, and the products of the terms, for so many rows."""
    terms, scales = torch.empty(2 * number, width, dtype=torch.int8), torch.empty(2 * number, 1)
    return terms, scales, torch.empty(number, width), torch.empty(2 * number, outputs)


class TwoTermProduct:
    """Rows as the sum of two rows of int8, each with a scale: the second one is what the first one leaves.

    That is 15 bits of each number. Sums of products of int8 are exact, so a row's result does not depend on others.
    """

    def __init__(self, rounded: torch.Tensor, scales: torch.Tensor) -> None:
        self._scales = scales.float()[None]  # oneDNN's object has a pointer to it.
        self._packed = ops.create_onednn_scaled_mm(
            rounded.t(), self._scales, torch.float32, dynamic_quant=True, use_azp=False
        )
        # Made before the first step, which is captured: so they, and all views of them, are constants of it.
        self._buffers = _buffers(rounded.shape[1], rounded.shape[0])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Float32 `[rows, outputs]`."""
        number, width = rows.shape
        if not number:
            return torch.empty(0, self._packed.n)
        few = number <= _FEW_ROWS
        terms, scales, rest, product = self._buffers if few else _make_buffers(width, self._packed.n, number)
        terms, scales, rest, product = terms[: 2 * number], scales[: 2 * number], rest[:number], product[: 2 * number]
        rows = rows.float().contiguous()
        torch.ops._C.dynamic_scaled_int8_quant(terms[:number], rows, scales[:number], None)
        torch.addcmul(rows, terms[:number], scales[:number], value=-1.0, out=rest)
        torch.ops._C.dynamic_scaled_int8_quant(terms[number:], rest, scales[number:], None)
        torch.ops._C.onednn_scaled_mm(product, terms, scales, None, None, None, self._packed.handler_tensor)
        return product[:number] + product[number:]


def check_int8(model: nn.Module, *, is_required: bool) -> None:
    """Logs how much of a loaded model stays in float.

    Raises:
        StageConfigError: All of it, and int8 is required.
    """
    count = sum(getattr(layer, "has_int8_weights", False) for layer in model.modules())
    if is_required and not count:
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
