# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters have the effect that they have in transformers on the same logits."""

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vllm_omni import OmniLLM
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.testing.hf_oracle import HFTextOracle
from vllm_omni.testing.media import make_prompt

GROUP = "llm"
pytestmark = pytest.mark.slow

PROMPT = [310, 425, 310, 11, 440, 401, 278]


@pytest.fixture(scope="module")
def oracle(tiny_qwen3: Any) -> HFTextOracle:
    return HFTextOracle(tiny_qwen3)


class OpenAIPenalties(LogitsProcessor):
    """Presence and frequency penalty of generated tokens, as defined in OpenAI's documentation."""

    def __init__(self, num_prompt_tokens: int, presence: float, frequency: float) -> None:
        self.num_prompt_tokens, self.presence, self.frequency = num_prompt_tokens, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.num_prompt_tokens :], minlength=scores.shape[-1])
        return scores - self.presence * (counts > 0) - self.frequency * counts


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 20}, [TopKLogitsWarper(20)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"repetition_penalty": 1.6}, [RepetitionPenaltyLogitsProcessor(1.6)]),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, [OpenAIPenalties(len(PROMPT), 1.5, 0.5)]),
        (
            {"repetition_penalty": 1.2, "temperature": 0.8, "top_k": 40, "top_p": 0.8},
            [
                RepetitionPenaltyLogitsProcessor(1.2),
                TemperatureLogitsWarper(0.8),
                TopKLogitsWarper(40),
                TopPLogitsWarper(0.8),
            ],
        ),
    ],
)
def test_the_distribution_of_every_token_equals_hf(
    params: dict[str, Any], processors: list[LogitsProcessor], text_llm: OmniLLM, oracle: HFTextOracle
) -> None:
    given = {"temperature": 1.0, "max_tokens": 10, "logprobs": -1, "seed": 5, "ignore_eos": True} | params
    (output,) = text_llm.generate({"prompt_token_ids": PROMPT}, [given], use_tqdm=False)
    (completion,) = output.outputs
    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    with torch.no_grad():
        logits = oracle.model(ids).logits[0]
    assert completion.logprobs is not None
    for i, entries in enumerate(completion.logprobs):
        position = len(PROMPT) + i
        scores = LogitsProcessorList(processors)(ids[:, :position], logits[None, position - 1])
        found = torch.full_like(scores[0], float("-inf"))
        for token, entry in entries.items():
            found[token] = entry.logprob
        torch.testing.assert_close(found, scores[0].log_softmax(-1), rtol=0, atol=2e-4)
        assert scores[0, completion.token_ids[i]] > float("-inf")


def sampled(thinker: int | None, talker: int | None) -> list[dict[str, Any] | None]:
    text = {"temperature": 1.0, "max_tokens": 10, "seed": thinker}
    speech = {"temperature": 1.0, "top_k": 50, "max_tokens": 12, "seed": talker, "detokenize": False}
    return [text, speech, None]


def test_seeds_reproduce_text_and_speech_alone_and_in_a_batch(talking_llm: OmniLLM, tiny_qwen3_omni_moe: Any) -> None:
    prompts = [make_prompt(tiny_qwen3_omni_moe, kind) for kind in ("text", "image", "text")]
    alone = [talking_llm.generate(prompt, sampled(3, 4), use_tqdm=False) for prompt in prompts]
    batch = talking_llm.generate(prompts, sampled(3, 4), use_tqdm=False)
    for i, (text, speech) in enumerate(alone):
        assert text.outputs[0].token_ids == batch[2 * i].outputs[0].token_ids
        assert_same_speech(speech, batch[2 * i + 1])
    assert_same_speech(alone[0][1], alone[2][1])


def test_each_stage_has_a_seed_of_its_own(talking_llm: OmniLLM, tiny_qwen3_omni_moe: Any) -> None:
    prompt = make_prompt(tiny_qwen3_omni_moe, "text")
    (text, speech), (same_text, other_speech), (other_text, _) = (
        talking_llm.generate(prompt, sampled(*seeds), use_tqdm=False) for seeds in ((3, 4), (3, 5), (6, 4))
    )
    assert text.outputs[0].token_ids == same_text.outputs[0].token_ids != other_text.outputs[0].token_ids
    a, b = speech.multimodal_output["audio"], other_speech.multimodal_output["audio"]
    assert a.shape != b.shape or not torch.allclose(a, b, atol=1e-2)
    unseeded = [
        talking_llm.generate(prompt, sampled(None, 4), use_tqdm=False)[0].outputs[0].token_ids for _ in range(2)
    ]
    assert unseeded[0] != unseeded[1]


def test_several_texts_and_the_speech_of_the_first(talking_llm: OmniLLM, tiny_qwen3_omni_moe: Any) -> None:
    """Sequence i is drawn with the seed plus i, as vLLM does."""
    prompt = make_prompt(tiny_qwen3_omni_moe, "text")
    three = sampled(3, 4)
    assert three[0] is not None
    three[0]["n"] = 3
    texts, speech = talking_llm.generate(prompt, three, use_tqdm=False)
    alone = [talking_llm.generate(prompt, sampled(3 + i, 4), use_tqdm=False) for i in range(3)]
    assert [c.token_ids for c in texts.outputs] == [text.outputs[0].token_ids for text, _ in alone]
    assert len({tuple(c.token_ids) for c in texts.outputs}) == 3
    assert_same_speech(speech, alone[0][1])
    *_, end = talking_llm.generate(prompt, three, stream=True)
    streamed_texts, streamed_speech = end.outputs  # type: ignore[union-attr]
    assert [c.token_ids for c in streamed_texts.outputs] == [c.token_ids for c in texts.outputs]
    assert [c.text for c in streamed_texts.outputs] == [c.text for c in texts.outputs]
    assert_same_speech(speech, streamed_speech)


def assert_same_speech(one: OmniRequestOutput, other: OmniRequestOutput) -> None:
    audio = one.multimodal_output["audio"]
    assert audio.numel() > 0
    torch.testing.assert_close(other.multimodal_output["audio"], audio, rtol=0, atol=1e-4)
