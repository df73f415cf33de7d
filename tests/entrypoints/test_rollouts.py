# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of sampled tokens are those that a trainer computes of the same tokens, in float32."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.entrypoints.conftest import start
from vllm_omni import OmniRequestOutput

TOLERANCE = 1e-5
PROMPTS = ["a hen", "two hens and a fox", "a fox", "the red circle is above the blue square, is it not"]
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 24, "logprobs": 0, "ignore_eos": True}


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, output: OmniRequestOutput) -> torch.Tensor:
    """`[num_tokens]`, of the sampled tokens."""
    assert output.prompt_token_ids is not None
    sampled = list(output.outputs[0].token_ids)
    logits = model(torch.tensor([[*output.prompt_token_ids, *sampled]])).logits[0]
    rows = logits[-len(sampled) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(sampled)[:, None])[:, 0]


def reported(output: OmniRequestOutput) -> torch.Tensor:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return torch.tensor([each[i].logprob for each, i in zip(completion.logprobs, completion.token_ids, strict=True)])


def test_logprobs_are_the_trainers(tiny_qwen3: Path) -> None:
    """Of requests that are computed together, and alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    with start(tiny_qwen3, max_model_len=256) as llm:
        together = llm.generate(PROMPTS, [SAMPLED | {"seed": 7}], use_tqdm=False)
        alone = [llm.generate([prompt], [SAMPLED | {"seed": 7}], use_tqdm=False)[0] for prompt in PROMPTS]
    for batched, single in zip(together, alone, strict=True):
        assert batched.outputs[0].token_ids == single.outputs[0].token_ids
        assert len(batched.outputs[0].token_ids) == SAMPLED["max_tokens"]
        for output in (batched, single):
            difference = (reported(output) - logprobs_of(model, output)).abs().max().item()
            assert difference == pytest.approx(0, abs=TOLERANCE)
