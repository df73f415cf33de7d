# SPDX-License-Identifier: Apache-2.0
"""The simulated device refuses mixed devices as a GPU does, computes as a CPU does, and counts synchronizations."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu


@pytest.mark.parametrize(
    "mix",
    [
        lambda ours, cpu: ours + cpu,
        lambda ours, cpu: torch.cat([ours, cpu]),
        lambda ours, cpu: cpu.add_(ours),
        lambda ours, cpu: torch.add(ours, ours, out=cpu),
        lambda ours, cpu: cpu[torch.zeros(1, dtype=torch.int64, device=DEVICE)],
        lambda ours, cpu: ours.__setitem__(torch.zeros(2, dtype=torch.int64), cpu[:2]),
        lambda ours, cpu: nn.Linear(3, 3)(ours),
        lambda ours, cpu: ours.exponential_(generator=torch.Generator()),
        lambda ours, cpu: ours.numpy(),
        lambda ours, cpu: np.asarray(ours),
        lambda ours, cpu: torch.randn(3, generator=torch.Generator(DEVICE)),
    ],
)
def test_mixtures_are_refused(device: SimulatedDevice, mix) -> None:
    with pytest.raises((RuntimeError, TypeError)), torch.no_grad():
        mix(torch.ones(3, 3, device=DEVICE), torch.ones(3, 3))


def test_operations_of_a_gpu_work(device: SimulatedDevice) -> None:
    ours = torch.arange(6.0).view(2, 3).to(DEVICE)
    ours[:1] = torch.zeros(1, 3)  # a copy
    ours += torch.tensor(1.0)  # a number
    view = ours[torch.tensor([1])], ours[[0]], ours[:, 1:].mul_(2)
    assert [part.tolist() for part in view] == [[[4, 5, 6]], [[1, 1, 1]], [[2, 2], [10, 12]]]
    assert on_cpu(ours).tolist() == [[1, 2, 2], [4, 10, 12]]
    linear = nn.Linear(3, 2)
    expected = linear(torch.ones(3))
    assert torch.equal(on_cpu(linear.to(DEVICE)(torch.ones(3, device=DEVICE))), expected)


def test_waits_are_counted(device: SimulatedDevice) -> None:
    ours = torch.arange(3.0, device=DEVICE)
    ours.to("cpu", non_blocking=True)
    torch.empty(3, pin_memory=True).copy_(ours, non_blocking=True)
    assert device.num_waits == 0
    assert ours.tolist() == [0, 1, 2] and ours[1].item() == 1 and bool((ours < 3).all())
    assert device.num_waits == 3
    assert len(ours[ours > 0]) == 2
    assert device.num_waits == 4
