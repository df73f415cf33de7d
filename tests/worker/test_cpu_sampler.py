# SPDX-License-Identifier: Apache-2.0
"""Penalties for the tokens that a request has are vLLM's, which are for the whole vocabulary, to the bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.sampler import Sampler

from vllm_omni.worker.cpu_sampler import CPUSampler, SparseSampler
from vllm_omni.worker.cpu_worker import CPUARModelRunner, CPUFeedbackARModelRunner
from vllm_omni.worker.gpu_model_runner import SuppressingSampler

VOCAB = 50
PROMPTS = torch.tensor([[3, 3, 7, VOCAB], [0, VOCAB, VOCAB, VOCAB], [49, 1, 2, 3], [5, 6, 7, 8]])
OUTPUTS = [[7, 9, 9], [], [49, -1], [0] * 9]
"""-1: not known yet."""


def make_metadata(**penalties: float) -> Any:
    """Of four requests, the last one without penalties."""
    values = {name: torch.full((4,), neutral) for name, neutral in (("frequency", 0.0), ("presence", 0.0))}
    values["repetition"] = torch.ones(4)
    for name, value in penalties.items():
        values[name][:3] = value
    tensors = {f"{name}_penalties": tensor for name, tensor in values.items()}
    return SimpleNamespace(no_penalties=not penalties, prompt_token_ids=PROMPTS if penalties else None, **tensors)


@pytest.mark.parametrize("suppresses", [False, True])
@pytest.mark.parametrize(
    "penalties",
    [
        {},
        {"repetition": 1.1},
        {"repetition": 0.7},
        {"frequency": 0.5},
        {"presence": -0.5},
        {"repetition": 1.3, "frequency": 0.5, "presence": 0.25},
    ],
)
def test_penalties(penalties: dict[str, float], suppresses: bool) -> None:
    metadata, logits = make_metadata(**penalties), torch.randn(4, VOCAB)
    logits[0, 7], logits[2, 49], logits[1, 4] = 0.0, -torch.inf, torch.inf
    expected = logits.clone()
    if penalties:
        tensors = [getattr(metadata, f"{name}_penalties") for name in ("presence", "frequency", "repetition")]
        apply_all_penalties(expected, PROMPTS, *tensors, OUTPUTS)
    sampler: Sampler = SparseSampler()
    if suppresses:
        sampler = SuppressingSampler(sampler, torch.zeros(VOCAB, dtype=torch.bool))

    result = sampler.apply_penalties(logits, metadata, OUTPUTS)

    assert result is logits and torch.equal(logits, expected)


@pytest.mark.parametrize("runner", [CPUARModelRunner, CPUFeedbackARModelRunner])
def test_runners_that_sample_have_it(runner: type) -> None:
    assert issubclass(runner, CPUSampler)
