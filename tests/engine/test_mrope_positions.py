# SPDX-License-Identifier: Apache-2.0
"""Positions given with a request replace the model's own, in its prompt and for every token it generates."""

import pytest
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from tests.engine.running import greedy, random_prompts, run

TOLERANCE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def thinker(tiny_qwen3_omni_moe):
    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny_qwen3_omni_moe, dtype=torch.float32).eval().thinker


def with_generated(positions, num_generated):
    """Generated tokens count on from the highest position of the prompt, on all axes."""
    return torch.cat([positions, positions.max() + 1 + torch.arange(num_generated).expand(3, -1)], dim=1)


@torch.no_grad()
def assert_like_transformers(output, thinker, prompt, positions):
    token_ids = list(output.outputs[0].token_ids)
    fed = prompt + token_ids[:-1]
    positions = with_generated(positions, len(token_ids))[:, : len(fed)]
    expected = thinker.model(input_ids=torch.tensor([fed]), position_ids=positions[:, None]).last_hidden_state[0]
    torch.testing.assert_close(output.multimodal_output["hidden"], expected, **TOLERANCE)
    assert thinker.lm_head(expected[len(prompt) - 1 :]).argmax(-1).tolist() == token_ids


def test_given_positions(thinker_engine, thinker):
    prompts = random_prompts(20, 50, 9)
    positions = [
        torch.arange(20).expand(3, -1) * torch.tensor([[1], [2], [3]]),
        torch.randint(70, (3, 50), generator=torch.Generator().manual_seed(0)),
        torch.zeros(3, 9, dtype=torch.int64),
    ]
    inputs = [
        {"prompt_token_ids": prompt, "additional_information": {"mrope_positions": given}}
        for prompt, given in zip(prompts, positions, strict=True)
    ]
    for output, prompt, given in zip(run(thinker_engine, inputs, greedy(8)), prompts, positions, strict=True):
        assert_like_transformers(output, thinker, prompt, given)


def test_given_positions_of_generated_tokens(thinker_engine, thinker):
    """Some are given; those after them count on."""
    prompts = random_prompts(12, 30)
    positions = [torch.randint(70, (3, length), generator=torch.Generator().manual_seed(2)) for length in (17, 45)]
    inputs = [
        {"prompt_token_ids": prompt, "additional_information": {"mrope_positions": given}}
        for prompt, given in zip(prompts, positions, strict=True)
    ]
    for output, prompt, given in zip(run(thinker_engine, inputs, greedy(9)), prompts, positions, strict=True):
        assert_like_transformers(output, thinker, prompt, given)


def test_without_positions_the_models_own(thinker_engine, thinker):
    (prompt,) = random_prompts(40)
    (output,) = run(thinker_engine, [{"prompt_token_ids": prompt}], greedy(6))
    assert_like_transformers(output, thinker, prompt, torch.arange(40).expand(3, -1))


def test_they_survive_preemption(thinker_engine, thinker):
    (prompt,) = random_prompts(45)
    positions = torch.randint(60, (3, 45), generator=torch.Generator().manual_seed(1))
    information = {"mrope_positions": positions}
    thinker_engine.add_request("0", {"prompt_token_ids": prompt, "additional_information": information}, greedy(8))
    outputs = []
    for step in range(16):
        outputs += thinker_engine.step()
        if step in (0, 4):
            thinker_engine.reset_prefix_cache(reset_running_requests=True)
    (output,) = outputs
    assert_like_transformers(output, thinker, prompt, positions)
