# SPDX-License-Identifier: Apache-2.0
"""A table in half precision is one in float32 for all that reads it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from vllm_omni.worker.half_table import HalfTable, as_half, replace_parameters


def make_table(dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Float32 `[7, 4]` that `dtype` holds."""
    torch.manual_seed(0)
    return (torch.randn(7, 4) * scale).to(dtype).float()


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        (torch.float16, 1.0, torch.float16),
        (torch.bfloat16, 1.0, torch.float16),
        (torch.bfloat16, 1e-5, torch.bfloat16),  # float16 rounds these.
        (torch.bfloat16, 1e6, torch.bfloat16),
        (torch.float32, 1.0, None),
    ],
)
def test_the_half_has_the_same_numbers(dtype: torch.dtype, scale: float, expected: torch.dtype | None) -> None:
    table = make_table(dtype, scale)
    half = as_half(table)
    assert expected is (None if half is None else half.dtype)
    assert half is None or half.float().equal(table)


def test_the_half_does_not_keep_a_parameter_alive() -> None:
    half = as_half(nn.Parameter(make_table(torch.float16)))
    assert half is not None and half.grad_fn is None


@torch.inference_mode()
def test_all_that_reads_it_finds_float32() -> None:
    expected = make_table(torch.float16)
    table, ids, x = HalfTable(expected.half()), torch.tensor([[3, 0], [6, 3]]), torch.randn(2, 4)
    assert table.dtype == torch.float32 and table.shape == (7, 4) and table.device == expected.device
    for compute in (
        lambda weight: functional.embedding(ids, weight),
        lambda weight: functional.linear(x, weight),
        lambda weight: weight[ids],
        lambda weight: weight.data * 2,
        lambda weight: torch.cat([weight, weight]),
    ):
        found = compute(table)
        assert found.dtype == torch.float32 and found.equal(compute(expected))


def test_layers_that_share_a_parameter_share_the_table() -> None:
    weight, ids, x = (
        nn.Parameter(make_table(torch.float16), requires_grad=False),
        torch.tensor([1, 5]),
        torch.ones(1, 4),
    )
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 4), "head": nn.Linear(4, 7), "other": nn.Linear(4, 7)})
    model["embedding"].weight = model["head"].weight = weight
    other, bias = model["other"].weight, model["head"].bias
    expected = model["embedding"](ids), model["head"](x)

    replace_parameters(model, {weight: weight.detach().half()})

    assert model["embedding"].weight is model["head"].weight is not weight
    assert isinstance(model["head"].weight, HalfTable) and isinstance(model["head"].weight, nn.Parameter)
    assert model["other"].weight is other and model["head"].bias is bias
    torch.testing.assert_close((model["embedding"](ids), model["head"](x)), expected, rtol=0, atol=0)
