# SPDX-License-Identifier: Apache-2.0
"""What a trainer computes for sampled tokens is what their outputs say, alone and among others."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.entrypoints.conftest import start
from vllm_omni import OmniRequestOutput

ATOL, RTOL = 1e-5, 1e-6
"""Logits of these models are in the tens, of which float32 has six digits after the point."""
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": 0}
TEXTS = ["a hen", "two hens and a fox", "what is this"]


def log_probs_of(output: OmniRequestOutput, index: int = 0) -> torch.Tensor:
    """Of the sampled tokens, `[tokens]`."""
    choice = output.outputs[index]
    assert choice.logprobs is not None
    return torch.tensor([row[token].logprob for row, token in zip(choice.logprobs, choice.token_ids, strict=True)])


def gather(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


@torch.no_grad()
def test_log_probabilities_of_sampled_tokens(tiny_qwen3: Path) -> None:
    params = {**SAMPLED, "n": 4, "max_tokens": 24, "ignore_eos": True, "seed": 1}
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    with start(tiny_qwen3, max_model_len=256) as llm:
        outputs = [*llm.generate(TEXTS, [params], use_tqdm=False), *llm.generate(TEXTS[:1], [params], use_tqdm=False)]
    for output in outputs:
        for index, choice in enumerate(output.outputs):
            tokens = torch.tensor([*(output.prompt_token_ids or ()), *choice.token_ids])
            logits = model(tokens[None]).logits[0, -len(choice.token_ids) - 1 : -1]
            expected = gather(logits, torch.tensor(choice.token_ids))
            torch.testing.assert_close(log_probs_of(output, index), expected, atol=ATOL, rtol=RTOL)
