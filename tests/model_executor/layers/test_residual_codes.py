# SPDX-License-Identifier: Apache-2.0
"""How residual codes are sampled, against HF's filters."""

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper
from vllm.sampling_params import SamplingParams

from vllm_omni.model_executor.layers.residual_codes import MAX_TOP_K, ResidualFilter, ResidualSampler, ResidualSampling


def exponential_noise(batch: int, steps: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(batch, steps, MAX_TOP_K).exponential_(generator=generator)


@pytest.mark.parametrize(
    "residual", [ResidualFilter(1.0, 50, 0.8), ResidualFilter(0.9, 50, 1.0), ResidualFilter(1.5, 7, 0.9)]
)
def test_sampling_draws_from_hf_s_filtered_distribution(residual: ResidualFilter) -> None:
    draws = 20_000
    logits = 2.0 * torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    filtered = logits / residual.temperature
    for warper in (TopKLogitsWarper(residual.top_k), TopPLogitsWarper(residual.top_p)):
        filtered = warper(None, filtered)
    expected = filtered.softmax(-1)[0]
    sampling = ResidualSampling(torch.tensor([residual] * draws), exponential_noise(draws, 1))
    drawn = sampling.sample(logits.expand(draws, -1), 0).bincount(minlength=128) / draws
    assert ((drawn > 0) <= (expected > 0)).all()
    assert (expected > 0).sum() > 5
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0.015)


def test_a_codebook_smaller_than_top_k_can_be_sampled() -> None:
    sampling = ResidualSampling(torch.tensor([ResidualFilter()] * 3), exponential_noise(3, 1))
    assert sampling.sample(torch.randn(3, 8), 0).max() < 8


def test_a_slot_begins_without_what_a_request_left_that_did_not_begin() -> None:
    """Something may raise after its sampling was set: the slot is not taken, and nobody ends it."""
    sampler = ResidualSampler(2, 1, torch.device("cpu"))
    sampler.begin(0, SamplingParams(seed=1), ResidualFilter())
    sampler.begin(0, SamplingParams(temperature=0.0), ResidualFilter())
    assert sampler.draw(torch.tensor([0])) is None
