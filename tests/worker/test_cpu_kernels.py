# SPDX-License-Identifier: Apache-2.0
"""Norms by vLLM's CPU kernels are those of torch, wherever a kernel is used."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import ir
from vllm.config import CompilationMode

from vllm_omni.worker.cpu_kernels import use_cpu_kernels

OPERATIONS = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)


def make_config(mode: CompilationMode = CompilationMode.NONE) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(mode=mode))


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    """vLLM's default of a CPU, restored."""
    before = [operation.get_priority() for operation in OPERATIONS]
    for operation in OPERATIONS:
        operation.set_default(["native"])
    yield
    for operation, names in zip(OPERATIONS, before, strict=True):
        operation.set_default(names or ["native"])


@pytest.mark.parametrize(
    ("x", "weight", "provider"),
    [
        (torch.randn(1, 576), torch.randn(576), "vllm_cpu"),
        (torch.randn(3, 8), torch.randn(8), "vllm_cpu"),
        (torch.randn(2, 5, 16), torch.randn(16), "vllm_cpu"),
        (torch.randn(2, 3, 64)[:, :2], torch.randn(64), "vllm_cpu"),  # Not contiguous, as the queries of a split.
        (torch.randn(3, 12), torch.randn(12), "native"),
        (torch.randn(3, 16), None, "native"),
        (torch.randn(3, 16).bfloat16(), torch.randn(16).bfloat16(), "native"),
    ],
)
def test_norms(x: torch.Tensor, weight: torch.Tensor | None, provider: str) -> None:
    residual = torch.randn_like(x)
    expected = ir.ops.rms_norm(x, weight, 1e-5)
    expected_sum = ir.ops.fused_add_rms_norm(x, residual, weight, 1e-5)

    use_cpu_kernels(make_config())

    assert ir.ops.rms_norm.dispatch(x, weight, 1e-5).provider == provider
    torch.testing.assert_close(ir.ops.rms_norm(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)
    actual = ir.ops.fused_add_rms_norm.maybe_inplace(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(actual, expected_sum, rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_others() -> None:
    use_cpu_kernels(make_config())
    x, weight = torch.randn(7, 64), torch.randn(64)
    rows = torch.cat([ir.ops.rms_norm(row, weight, 1e-5) for row in x.split(1)])
    assert torch.equal(ir.ops.rms_norm(x, weight, 1e-5), rows)


def test_a_part_of_a_row_is_left_to_torch() -> None:
    use_cpu_kernels(make_config())
    assert ir.ops.rms_norm.dispatch(torch.randn(3, 16), torch.randn(16), 1e-5, 8).provider == "native"


def test_a_compiled_model_joins_torch_s_operations() -> None:
    use_cpu_kernels(make_config(CompilationMode.VLLM_COMPILE))
    assert all(operation.get_priority() == ["native"] for operation in OPERATIONS)
    use_cpu_kernels(make_config())
    use_cpu_kernels(make_config())
    assert all(operation.get_priority() == ["vllm_cpu", "native"] for operation in OPERATIONS)
