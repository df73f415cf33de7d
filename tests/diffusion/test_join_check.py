# SPDX-License-Identifier: Apache-2.0
"""When joint calls are compared with their calls alone, and what is equal."""

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

from tests.simulated_device import DEVICE, SimulatedDevice
from vllm_omni.diffusion import join_check
from vllm_omni.diffusion.batched_call import ModuleCall, SharedTensors
from vllm_omni.diffusion.join_check import JoinChecks, are_close, precision_of


def network(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def call(x: float, y: float, length: int = 3) -> ModuleCall:
    return ModuleCall.describe(network, (torch.full((1, length), x), torch.full((1, length), y)), {}, SharedTensors())


def is_due(checks: JoinChecks, *calls: ModuleCall) -> bool:
    differing = checks.find_unchecked(calls)
    if differing is not None:
        checks.record(calls, differing)
    return differing is not None


def test_a_layout_is_compared_until_all_its_values_have_differed():
    checks = JoinChecks()
    assert is_due(checks, call(1, 1), call(1, 1))
    assert not is_due(checks, call(2, 2), call(2, 2))
    assert is_due(checks, call(1, 1), call(1, 1), call(2, 1))
    assert not is_due(checks, call(1, 1), call(3, 1))
    assert is_due(checks, call(1, 1), call(1, 2))
    assert not is_due(checks, call(1, 1), call(2, 2))
    assert is_due(checks, call(1, 1, length=4), call(2, 2, length=4))


def test_what_was_not_compared_is_due_again():
    checks = JoinChecks()
    assert checks.find_unchecked([call(1, 1), call(2, 1)]) == checks.find_unchecked([call(1, 1), call(2, 1)]) == {0}


def test_forgotten_layouts_are_compared_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(join_check, "MAX_LAYOUTS", 2)
    checks = JoinChecks()
    for length in (1, 2, 3, 1):
        assert is_due(checks, call(1, 1, length), call(2, 2, length))
        assert not is_due(checks, call(1, 1, length), call(2, 2, length))


PRECISE = precision_of(torch.float32, torch.device("cpu"))
VALUES = torch.linspace(-3, 3, 1001)


@pytest.mark.parametrize(
    ("joint", "alone", "precision", "expected"),
    [
        (VALUES + 1e-5, VALUES, PRECISE, True),
        (VALUES + 1e-2, VALUES, PRECISE, False),
        (VALUES + 1e-2, VALUES, precision_of(torch.bfloat16, torch.device("cpu")), True),
        ((VALUES + 1e-2).half(), VALUES.half(), PRECISE, True),  # the type of the output is coarser
        (VALUES + 1, VALUES, precision_of(torch.bfloat16, torch.device("cpu")), False),
        (1e30 * VALUES, 1e30 * VALUES, PRECISE, True),
        (torch.full((4,), torch.inf), torch.full((4,), torch.inf), PRECISE, True),
        (torch.full((4,), torch.nan), torch.full((4,), torch.nan), PRECISE, True),
        (torch.full((4,), torch.nan), torch.ones(4), PRECISE, False),
        (torch.zeros(4), torch.zeros(4), PRECISE, True),
        (torch.ones(4), torch.ones(2, 2), PRECISE, False),
        (torch.ones(0), torch.ones(0), PRECISE, True),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), PRECISE, True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), PRECISE, False),
        ([VALUES, None], [VALUES, None], PRECISE, True),
        ((VALUES, [VALUES]), (VALUES, [-VALUES]), PRECISE, False),
        (BaseModelOutput(VALUES), BaseModelOutputWithPast(VALUES, past_key_values=object()), PRECISE, True),
        (BaseModelOutput(VALUES), BaseModelOutput(-VALUES), PRECISE, False),
    ],
)
def test_outputs_are_equal_up_to_rounding(
    joint: object, alone: object, precision: float, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(join_check, "CHUNK", 300)
    assert are_close(joint, alone, precision) is expected


def test_convolutions_of_an_accelerator_are_not_exact(device: SimulatedDevice):
    assert precision_of(torch.float32, torch.device(DEVICE)) == precision_of(torch.float16, torch.device("cpu"))
