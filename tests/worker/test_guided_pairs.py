# SPDX-License-Identifier: Apache-2.0
"""Which sequences of a step sample together, and from which logits."""

import numpy as np
import pytest
import torch

from tests.simulated_device import DEVICE, SimulatedDevice
from vllm_omni.core.sched.output import GuidedPair
from vllm_omni.worker import guided_pairs
from vllm_omni.worker.guided_pairs import GuidedPairs, StepPairs

INF = float("inf")


@pytest.fixture
def pairs() -> GuidedPairs:
    pairs = GuidedPairs()
    for name, scale in (("a", 2.0), ("b", 0.5)):
        pairs.add(GuidedPair(name, f"{name}'", scale))
        pairs.add(GuidedPair(name, f"{name}'", scale))  # of the other sequence
    return pairs


def test_both_sample_or_neither(pairs: GuidedPairs) -> None:
    assert len(pairs) == 2
    assert [pairs.is_twin(name) for name in ("a", "a'", "other")] == [False, True, False]
    step = pairs.select({"a": 3, "b": 0, "b'": 2, "other": 1}.get)
    assert (step.guided, step.twins, step.scales, step.waiting) == ([0], [2], [0.5], {"a"})
    assert pairs.select({"a'": 0, "other": 1}.get).waiting == {"a'"}
    pairs.remove("other")
    pairs.remove("a'")
    pairs.remove("a")
    assert len(pairs) == 1 and not pairs.select({"a": 3}.get).waiting


def test_logits_and_tokens(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the request must not sample stays so, also where its twin has the same mask."""

    def copy(array: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    monkeypatch.setattr(guided_pairs, "async_tensor_h2d", copy)  # vLLM's CPU worker has one that copies to no device.
    step = StepPairs(guided=[2, 0], twins=[1, 3], scales=[2.0, 0.5])
    rows = [[1.0, 2.0, -INF], [5.0, 1.0, -INF], [1.0, 4.0, -INF], [3.0, 4.0, 7.0]]
    logits = torch.tensor(rows, device=DEVICE)
    step.combine(logits)
    assert logits[2].cpu().tolist() == [-3.0, 7.0, -INF] and logits[0].cpu().tolist() == [2.0, 3.0, -INF]
    assert logits[1].cpu().tolist() == rows[1] and logits[3].cpu().tolist() == rows[3]
    token_ids = torch.tensor([[10], [11], [12], [13]], device=DEVICE)
    step.share_tokens(token_ids)
    assert token_ids.cpu().tolist() == [[10], [12], [12], [10]]


def test_at_a_scale_of_one_the_logits_are_the_requests_own() -> None:
    """In floating point, `uncond + (cond - uncond)` is not always `cond`."""
    logits = torch.tensor([[0.1, 0.7, -INF], [1e8, -3e7, -INF]])
    kept = logits.clone()
    StepPairs(guided=[0], twins=[1], scales=[1.0]).combine(logits)
    assert torch.equal(logits, kept)


def test_a_step_without_pairs_changes_nothing() -> None:
    logits, token_ids = torch.randn(2, 3), torch.tensor([[1], [2]])
    kept = logits.clone()
    step = GuidedPairs().select({}.get)
    step.combine(logits)
    step.share_tokens(token_ids)
    assert torch.equal(logits, kept) and token_ids.tolist() == [[1], [2]]
