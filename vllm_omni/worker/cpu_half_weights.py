# SPDX-License-Identifier: Apache-2.0
"""Weights in half precision on a CPU, where they are the same numbers.

A step that computes few rows takes as long as it takes to read the weights. A model in float32 whose checkpoint is in
float16 or bfloat16 therefore reads twice the bytes it has: here its linear layers keep float16 and multiply in float32
(FBGEMM, which needs AVX2). vLLM's hook for other kernels is a quantization, so this is one that rounds nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_omni.worker.half_table import as_half, replace_parameters

_ENGINES = ("x86", "fbgemm")
_TOLERANCE = 2.0**-25
"""Half of the smallest float16: values of bfloat16 below 1e-5 are rounded by at most this, all others are exact."""


class CPUHalfWeights(CPUModelRunner):
    """A base of our runners."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.vllm_config.quant_config is None and _is_useful(self.vllm_config):
            self.vllm_config.quant_config = HalfWeightsConfig()
        super().load_model(*args, **kwargs)
        if self.vllm_config.compilation_config.mode == CompilationMode.NONE:
            _halve_tables(self.model)


class HalfWeightsConfig(QuantizationConfig):
    """Packs each linear layer whose weights are the same in float16; all others are computed as without it."""

    def get_name(self) -> str:  # type: ignore[override]  # Not one of vLLM's.
        return "half_weights"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "HalfWeightsConfig":
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return HalfLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):  # Also the head.
            return HalfEmbeddingMethod()
        return None


class HalfLinearMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not can_pack(layer):
            super().process_weights_after_loading(layer)
            return
        weight: Any = layer.weight
        packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), None)
        layer.cpu_linear = functools.partial(_multiply, lambda: packed)  # type: ignore[assignment]
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class HalfEmbeddingMethod(UnquantizedEmbeddingMethod):
    """The weights remain for the embedding of tokens.

    A head has the packed ones in addition, and shares them with the embedding that it shares its weights with. Those of
    an embedding alone are packed by the first product, since few models have one.
    """

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        if not hasattr(weight, "packed_once"):
            if not can_pack(layer):
                super().process_weights_after_loading(layer)
                return
            weight.packed_once = _PackedOnce(weight.detach())  # Of the same memory, without a reference to itself.
        layer.cpu_linear = functools.partial(_multiply, weight.packed_once)  # type: ignore[assignment]
        if isinstance(layer, ParallelLMHead):
            weight.packed_once()


class _PackedOnce:
    """Packed weights, which the first call makes.

    Attributes:
        source: What they are made of; None afterwards.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.source: torch.Tensor | None = source
        self._packed: Any = None

    def __call__(self) -> Any:
        if self.source is not None:
            self._packed = torch.ops.quantized.linear_prepack_fp16(self.source.float(), None)
            self.source = None
        return self._packed


def _halve_tables(model: nn.Module) -> None:
    """Has the weights of embeddings and heads, which are packed or will be, take half of their memory."""
    tables: dict[torch.Tensor, torch.Tensor] = {}
    for weight in model.parameters():
        packed: _PackedOnce | None = getattr(weight, "packed_once", None)
        if packed is not None and (half := as_half(weight)) is not None:
            tables[weight] = half
            if packed.source is not None:
                packed.source = half
    replace_parameters(model, tables)


def can_pack(layer: Any) -> bool:
    """Whether the weights are float32 `[num_outputs, num_inputs]` that float16 holds too."""
    weight: torch.Tensor = layer.weight
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):  # vLLM reads these weights itself.
        return False
    if torch.backends.quantized.engine not in _ENGINES:
        return False
    if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.float32 or not weight.numel():
        return False
    if not weight.sum().isfinite():
        return False
    half = weight.half().float()
    return torch.equal(half, weight) or bool((half - weight).abs_().max() <= _TOLERANCE)


def _multiply(
    packed: Callable[[], Any], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """What vLLM's methods on a CPU call as the layer's `cpu_linear`."""
    product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, packed())
    return product if bias is None else product.add_(bias)


def _is_useful(config: VllmConfig) -> bool:
    """Whether the model computes in float32, FBGEMM is there, and nothing compiles what it cannot look into."""
    return (
        config.model_config.dtype == torch.float32
        and config.compilation_config.mode == CompilationMode.NONE
        and torch.backends.quantized.engine in _ENGINES
    )
