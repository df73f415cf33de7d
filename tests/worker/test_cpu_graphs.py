# SPDX-License-Identifier: Apache-2.0
"""A captured step computes what the model computes, for other inputs too, and without the Python of the model."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode

from vllm_omni.worker.cpu_graphs import can_capture, capture


class Step:
    """Views and copies, operations in place, several results, results that nothing reads, and a state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.state = torch.zeros(2, 2, 3)
        self.num_calls = 0

    def __call__(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        product = x @ self.weight.t()
        copied = product.to(product.dtype, copy=True)
        left, right = product.split([2, 4], dim=-1)
        left.mul_(2.0)
        right[..., :2].add_(left)
        unused = torch.empty_like(right)
        unused.fill_(torch.inf)
        self.state.view(4, 3)[index, 1:] += left
        output = torch.empty(len(x), 4)
        torch.add(right.view(-1, 4)[:], self.weight.data[0], out=output)
        return torch.cat([output, copied, self.state.view(-1, 3).index_select(0, index)], dim=1).contiguous()


@torch.inference_mode()
def test_a_captured_function() -> None:
    step, other = Step(), Step()
    inputs = [(torch.randn(3, 4), torch.tensor(index)) for index in ([0, 3, 2], [1, 2, 3], [3, 0, 1], [0, 3, 2])]
    first = inputs[0]

    replay, output = capture(lambda: step(*first), first)

    assert replay is not None and torch.equal(output, other(*first))
    results = [replay(*each) for each in inputs[1:]]
    expected = [other(*each) for each in inputs[1:]]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))  # None was written to by a later one.
    assert torch.equal(step.state, other.state) and step.num_calls == 1


@torch.inference_mode()
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1 if x.sum() > 0 else x,
        lambda x: x * x.max().item(),
        lambda x: [x, x + 1],
    ],
)
def test_python_that_reads_results_is_not_captured(function: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(2)
    replay, output = capture(lambda: function(x), [x])
    assert replay is None
    torch.testing.assert_close(output, function(x))


@pytest.mark.parametrize(
    ("changes", "is_captured"),
    [
        ({}, True),
        ({"compilation_config": SimpleNamespace(mode=CompilationMode.VLLM_COMPILE)}, False),
        ({"lora_config": object()}, False),
        ({"parallel_config": SimpleNamespace(world_size=2)}, False),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, False),
        ({"kv_transfer_config": object()}, False),
    ],
)
def test_models_whose_steps_depend_on_shapes_alone(changes: dict[str, Any], is_captured: bool) -> None:
    config: Any = SimpleNamespace(
        **{
            "compilation_config": SimpleNamespace(mode=CompilationMode.NONE),
            "lora_config": None,
            "parallel_config": SimpleNamespace(world_size=1),
            "model_config": SimpleNamespace(is_encoder_decoder=False),
            "kv_transfer_config": None,
            **changes,
        }
    )

    class Declared(nn.Module, TorchCompileWithNoGuardsWrapper):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    assert can_capture(nn.Sequential(Declared()), config) == is_captured
    assert not can_capture(nn.Sequential(nn.Linear(2, 2)), config)
