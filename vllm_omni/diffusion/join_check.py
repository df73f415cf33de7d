# SPDX-License-Identifier: Apache-2.0
"""Whether a network computes the rows of a batch independently: joint calls compared with their calls alone.

A comparison shows nothing about arguments that were equal in all of its calls: a network that uses the positions of the
first row for all others is right until two of them differ. So the first joint call of each layout is compared, and each
later one in which an argument differs that has not differed before.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from vllm_omni.diffusion.batched_call import ModuleCall, count_rows, find_differing

MAX_LAYOUTS = 1000
"""That are remembered."""
CHUNK = 1 << 24
"""Elements that are compared at once: the copies in float64 take memory."""
_SMALL, _LARGE = 1e-12, 1e100


class JoinChecks:
    """The joint calls that have been compared, of one stage."""

    def __init__(self) -> None:
        self._differed: dict[Hashable, set[int]] = {}  # by layout: values with rows that differed in a comparison

    def find_unchecked(self, calls: Sequence[ModuleCall]) -> set[int] | None:
        """The values with rows in which these calls differ, if they have to be compared; None if they have not."""
        known = self._differed.get(calls[0].layout)
        if known is not None and len(known) == count_rows(calls[0]):
            return None
        differing = find_differing(calls, known or set())
        return None if known is not None and differing <= known else differing

    def record(self, calls: Sequence[ModuleCall], differing: set[int]) -> None:
        """Calls that differ in these values have been compared."""
        if len(self._differed) >= MAX_LAYOUTS:
            self._differed.clear()
        layout = calls[0].layout
        self._differed[layout] = self._differed.get(layout, set()) | differing


@torch.no_grad()
def are_close(joint: Any, alone: Any, precision: float) -> bool:
    """Whether two outputs of one call are equal up to rounding.

    Args:
        precision: The relative rounding error of the computation. Errors add up in a deep network: half of its digits
            have to be equal, in the root of the mean square.
    """
    match alone:
        case torch.Tensor() if joint.shape != alone.shape:
            return False
        case torch.Tensor() if not alone.is_floating_point():
            return torch.equal(joint, alone)
        case torch.Tensor():
            return _relative_error(joint, alone) <= max(precision, torch.finfo(alone.dtype).eps) ** 0.5
        case list() | tuple():
            return all(are_close(*pair, precision) for pair in zip(joint, alone, strict=True))
        case dict():  # without what is not split, an encoder's cache
            return all(are_close(value, alone[key], precision) for key, value in joint.items())
        case _:
            return True


def _relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The error in the root of the mean square. Videos are large: not all of their values are converted at a time."""
    error = size = torch.tensor(0.0, dtype=torch.float64, device=value.device)
    for pair in zip(value.flatten().split(CHUNK), expected.flatten().split(CHUNK), strict=True):
        a, b = (torch.nan_to_num(values.double(), posinf=_LARGE, neginf=-_LARGE) for values in pair)
        error, size = error + (a - b).square().sum(), size + b.square().sum()
    return float((error / (size + _SMALL)).sqrt())


def precision_of(dtype: torch.dtype, device: torch.device) -> float:
    """The relative rounding error of a stage's networks with weights of this type."""
    if dtype == torch.float32 and device.type != "cpu":
        dtype = torch.float16  # TF32, the default of convolutions, has as many digits
    return torch.finfo(dtype).eps
