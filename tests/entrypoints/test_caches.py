# SPDX-License-Identifier: Apache-2.0
"""A conversation finds its earlier turns in the caches of all stages, and is answered as HF transformers does it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.entrypoints.adapters import merge_adapter, write_adapter
from vllm_omni import OmniLLM
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import SAMPLE_RATE, make_audio, make_image

GROUP = "llm"
TEXT_TOKENS, CODES = 6, 9
EXACTLY = {
    f"{stage}_{bound}_tokens": value
    for stage, value in {"thinker": TEXT_TOKENS, "talker": CODES}.items()
    for bound in ("min", "max")
}
QUESTIONS = (
    "What is in this picture, and what does the voice say about it, at the beginning and at its end?",
    "And where is it? Near the river, or behind the hill?",
    "Is it small?",
)


def ask_in_turns(llm: OmniLLM, oracle: HFOracle, checkpoint: str) -> list[list[int]]:
    """The tokens in the prefix caches of thinker, talker and vocoder, for each turn."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    media = {"image": [make_image(77, 256, 256)], "audio": [(make_audio(77, 4.0), SAMPLE_RATE)]}
    messages: list[dict[str, Any]] = []
    cached = []
    for turn, question in enumerate(QUESTIONS):
        shown = [] if turn else [{"type": "image"}, {"type": "audio"}]
        messages.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = {"prompt": text, "multi_modal_data": media}
        answer, speech = llm.generate(prompt, params(), use_tqdm=False)
        expected = oracle.generate(prompt, **EXACTLY)
        token_ids = list(answer.outputs[0].token_ids)
        assert token_ids == expected.thinker_token_ids, turn
        torch.testing.assert_close(speech.multimodal_output["audio"], expected.audio, atol=1e-4, rtol=0)
        assert answer.request_output[0].num_cached_tokens == speech.stage_metrics[0].num_cached_tokens
        cached.append([stage.num_cached_tokens for stage in speech.stage_metrics])
        messages.append({"role": "assistant", "content": tokenizer.decode(token_ids, skip_special_tokens=True)})
    return cached


def params() -> list[SamplingParams]:
    codes = {"min_tokens": CODES, "max_tokens": CODES, "repetition_penalty": 1.05, "detokenize": False}
    return [
        SamplingParams(temperature=0, min_tokens=TEXT_TOKENS, max_tokens=TEXT_TOKENS),
        SamplingParams(temperature=0, **codes),
        SamplingParams(max_tokens=1, seed=0, detokenize=False),
    ]


def media_counts(llm: OmniLLM) -> tuple[CacheCounts, CacheCounts]:
    """Of preprocessed media, and of encoded ones."""
    return llm._pipeline.builder.media_cache_counts(), llm.stats()[0].caches["encoder"]


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": f"<|im_start|>user\n{QUESTIONS[0] * 8}<|im_end|>\n<|im_start|>assistant\n"},
        {"messages": [{"role": "user", "content": QUESTIONS[1] * 8}]},
    ],
    ids=["prompt", "messages"],
)
def test_a_salt_separates_the_caches_of_all_stages(talking_llm, prompt):
    cached = []
    for salt in ("ann", "ann", "ben", None):
        _, speech = talking_llm.generate(prompt | {"cache_salt": salt}, params(), use_tqdm=False)
        cached.append([stage.num_cached_tokens for stage in speech.stage_metrics[:2]])
    first, again, other, without = cached
    assert first == other == without == [0, 0]
    assert min(again) > 0


def test_an_adapter_has_rows_of_its_own(qwen2_5_llm: OmniLLM, tiny_qwen2_5_omni: Path, tmp_path: Path) -> None:
    folder = write_adapter(tiny_qwen2_5_omni, tmp_path / "adapter", 2, prefix="thinker.model.")
    merged = merge_adapter(tiny_qwen2_5_omni, folder, tmp_path / "merged")
    adapter = LoRARequest("rows", 2, str(folder))
    prompt = {"prompt": f"<|im_start|>user\n{QUESTIONS[1] * 12}<|im_end|>\n<|im_start|>assistant\n"}
    expected = {path: HFOracle(str(path)).generate(prompt, **EXACTLY) for path in (tiny_qwen2_5_omni, merged)}
    cached = []
    for path, lora_request in ((tiny_qwen2_5_omni, None), (merged, adapter), (merged, adapter)):
        answer, speech = qwen2_5_llm.generate(prompt, params(), use_tqdm=False, lora_request=lora_request)
        assert list(answer.outputs[0].token_ids) == expected[path].thinker_token_ids
        torch.testing.assert_close(speech.multimodal_output["audio"], expected[path].audio, atol=1e-4, rtol=0)
        cached.append(speech.stage_metrics[0].num_cached_tokens)
    assert cached[:2] == [0, 0] and cached[2] > 0


@pytest.mark.parametrize(
    ("fixture", "checkpoint"), [("qwen2_5_llm", "tiny_qwen2_5_omni"), ("talking_llm", "tiny_qwen3_omni_moe")]
)
def test_later_turns(request, fixture, checkpoint):
    llm, path = request.getfixturevalue(fixture), str(request.getfixturevalue(checkpoint))
    processed, encoded = media_counts(llm)
    first, *later = ask_in_turns(llm, HFOracle(path, num_threads=1), path)
    assert first == [0, 0, 0]
    for before, (thinker, talker, vocoder) in zip([first, *later], later, strict=False):
        assert thinker > 0 and talker > 0 and vocoder == 0
        assert thinker >= before[0] and talker >= before[1]
    now_processed, now_encoded = media_counts(llm)
    assert now_processed == processed + CacheCounts(queries=6, hits=4)
    num_encoded = now_encoded.queries - now_encoded.hits - (encoded.queries - encoded.hits)
    assert num_encoded == 2, "media were encoded again"
