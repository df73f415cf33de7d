# SPDX-License-Identifier: Apache-2.0
"""What a trainer computes for sampled tokens and codes is what their outputs say, alone and among others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.entrypoints.conftest import start
from tests.entrypoints.fake_pipelines import quick_servers
from vllm_omni import OmniLLM, OmniRequestOutput
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.oracles.csm import CsmReference, as_conversation

ATOL, RTOL = 1e-5, 1e-6
"""Logits of these models are in the tens, of which float32 has six digits after the point."""
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": 0}
TEXTS = ["a hen", "two hens and a fox", "what is this"]
CODES = "codes"


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


@pytest.mark.slow
@torch.no_grad()
def test_log_probabilities_of_sampled_codes(tiny_csm: Path, tmp_path: Path) -> None:
    """The first code of each frame; a stage with `final_output` returns them, with all codes of the frame."""
    config = yaml.safe_load((stage_configs_dir() / "csm.yaml").read_text())
    config["stage_args"][0] |= {"final_output": True, "final_output_type": CODES}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(config))
    reference = CsmReference(tiny_csm)
    params: list[Any] = [{**SAMPLED, "min_tokens": 8, "max_tokens": 20, "seed": 1}, None]
    limits: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    with quick_servers(), OmniLLM(str(tiny_csm), str(file), dtype="float32", **limits) as llm:
        batches = [llm.generate(texts, params, use_tqdm=False) for texts in (TEXTS, TEXTS[:1])]
    prompts = [*TEXTS, TEXTS[0]]
    found = [output for outputs in batches for output in outputs if output.final_output_type == CODES]
    assert len(found) == len(prompts)
    for prompt, output in zip(prompts, found, strict=True):
        codes = output.multimodal_output[CODES]
        tokens = torch.tensor(output.outputs[0].token_ids)
        assert len(tokens) > 2 and torch.equal(codes[: len(tokens), 0], tokens)
        inputs: Any = reference.processor.apply_chat_template(
            as_conversation({"prompt": prompt}), tokenize=True, return_dict=True
        )
        first = reference.model(**inputs, use_cache=True)
        others = reference.model(input_ids=codes[None, : len(tokens) - 1], past_key_values=first.past_key_values)
        expected = gather(torch.cat([first.logits[0, -1:], others.logits[0]]), tokens)
        torch.testing.assert_close(log_probs_of(output), expected, atol=ATOL, rtol=RTOL)
