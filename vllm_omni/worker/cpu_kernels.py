# SPDX-License-Identifier: Apache-2.0
"""The norms of models in float32 on a CPU, by vLLM's kernels.

vLLM's CPU build has them and does not use them: its layers compute a norm with seven operations of torch, which for a
step of one row takes fifty times as long. They are an implementation of vLLM's IR operations, as those on a GPU are.
"""

import torch
from torch import Tensor
from vllm import ir
from vllm.config import CompilationMode, VllmConfig
from vllm.platforms import current_platform

_PROVIDER = "vllm_cpu"
_MULTIPLE = 8
"""Of numbers that a kernel computes at once."""


def _has_kernel(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    is_float = weight is not None and x.dtype == weight.dtype == torch.float32
    return is_float and variance_size is None and x.shape[-1] % _MULTIPLE == 0


def _can_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _has_kernel(x, weight, variance_size)


def _can_add_and_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _has_kernel(x, weight, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


@ir.ops.rms_norm.register_impl(_PROVIDER, supports_args=_can_norm, supported=current_platform.is_cpu())
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    rows = x.contiguous()  # The kernel knows no strides.
    output = torch.empty_like(rows)
    torch.ops._C.rms_norm.default(output, rows, weight, epsilon)
    return output


@ir.ops.fused_add_rms_norm.register_impl(
    _PROVIDER, supports_args=_can_add_and_norm, supported=current_platform.is_cpu(), inplace=True
)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm.default(x, x_residual, weight, epsilon)
    return x, x_residual


def use_cpu_kernels(config: VllmConfig) -> None:
    """Has this process compute norms by these kernels, unless the model is compiled, which joins torch's operations."""
    if config.compilation_config.mode == CompilationMode.NONE:
        for operation in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            others = [name for name in operation.get_priority() if name != _PROVIDER]
            operation.set_default([_PROVIDER, *others])
