# SPDX-License-Identifier: Apache-2.0
"""vLLM's features of text generation, each once through a pipeline, compared with HF transformers."""

import json
import re
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.entrypoints.adapters import merge_adapter, write_adapter
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.request_builder import make_sampling_params
from vllm_omni.errors import InvalidControlError, InvalidRequestError, RequestAbortedError
from vllm_omni.events import CompletedEvent
from vllm_omni.testing.hf_oracle import HFOracle, HFTextOracle
from vllm_omni.testing.media import make_prompt

GROUP = "llm"
PROMPT = "user hello"
NUM_TOKENS = 12
JSON_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def oracle(tiny_qwen3: Path) -> HFTextOracle:
    return HFTextOracle(tiny_qwen3)


@pytest.fixture(scope="module")
def greedy(text_llm: OmniLLM) -> CompletionOutput:
    """The output without any of these features."""
    return complete(text_llm)


def generate(
    llm: OmniLLM, prompt: Any = PROMPT, lora_request: LoRARequest | None = None, **params: Any
) -> RequestOutput:
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS} | params
    (output,) = llm.generate(prompt, [params], use_tqdm=False, lora_request=lora_request)
    return output.request_output[0]


def complete(llm: OmniLLM, **params: Any) -> CompletionOutput:
    (completion,) = generate(llm, **params).outputs
    return completion


def test_greedy_equals_hf(greedy: CompletionOutput, oracle: HFTextOracle) -> None:
    assert greedy.token_ids == oracle.generate(PROMPT, max_tokens=NUM_TOKENS).token_ids
    assert greedy.text == oracle.tokenizer.decode(greedy.token_ids) and greedy.finish_reason == "length"


@pytest.mark.parametrize("included", [True, False])
def test_stop_strings(included: bool, text_llm: OmniLLM, greedy: CompletionOutput) -> None:
    stop = greedy.text[6:10]
    before = greedy.text.index(stop)
    completion = complete(text_llm, stop=[stop, "never generated"], include_stop_str_in_output=included)
    assert completion.text == greedy.text[: before + len(stop) * included]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == greedy.token_ids[: len(completion.token_ids)]


def test_stop_tokens_and_min_tokens(text_llm: OmniLLM, greedy: CompletionOutput) -> None:
    stop = greedy.token_ids[3]
    completion = complete(text_llm, stop_token_ids=[stop])
    assert completion.token_ids == greedy.token_ids[:4]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    later = complete(text_llm, stop_token_ids=[stop], min_tokens=6)
    assert later.token_ids[:3] == greedy.token_ids[:3]
    assert len(later.token_ids) >= 6 and stop not in later.token_ids[:6]


def test_logprobs_of_the_prompt_and_of_the_reply_equal_hf(text_llm: OmniLLM, oracle: HFTextOracle) -> None:
    output = generate(text_llm, logprobs=3, prompt_logprobs=2)
    (completion,) = output.outputs
    ids = [*(output.prompt_token_ids or ()), *completion.token_ids]
    with torch.no_grad():
        expected = oracle.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    num_prompt = len(ids) - len(completion.token_ids)
    assert output.prompt_logprobs is not None and completion.logprobs is not None
    assert output.prompt_logprobs[0] is None
    found = [*output.prompt_logprobs[1:], *completion.logprobs]
    assert len(found) == len(ids) - 1
    for position, entries in enumerate(found):
        assert entries is not None and ids[position + 1] in entries
        assert len(entries) >= (2 if position + 1 < num_prompt else 3)
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
    *_, end = text_llm.generate(PROMPT, [{"max_tokens": 4, "prompt_logprobs": 1}], stream=True)
    assert isinstance(end, CompletedEvent)
    assert len(end.outputs[0].request_output[0].prompt_logprobs or ()) == num_prompt


def test_restricted_tokens(text_llm: OmniLLM, greedy: CompletionOutput, oracle: HFTextOracle) -> None:
    first = greedy.token_ids[0]
    assert complete(text_llm, logit_bias={first: -100.0}).token_ids[0] != first
    assert set(complete(text_llm, logit_bias={17: 100.0}).token_ids) == {17}
    assert set(complete(text_llm, allowed_token_ids=[40, 41, 42]).token_ids) <= {40, 41, 42}
    words = ((token, oracle.tokenizer.decode([token])) for token in greedy.token_ids)
    token, word = next((token, word) for token, word in words if oracle.tokenizer.encode(word.strip()) == [token])
    assert token not in complete(text_llm, bad_words=[word]).token_ids


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        ({"regex": "[ab]{3}c"}, lambda text: re.fullmatch("[ab]{3}c", text)),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"json": JSON_SCHEMA}, lambda text: json.loads(text)["a"] in ("x", "yz")),
        ({"grammar": 'root ::= "x" | "yy"'}, lambda text: text in ("x", "yy")),
    ],
)
def test_structured_output(constraint: dict[str, Any], matches: Any, text_llm: OmniLLM) -> None:
    for structured in (constraint, StructuredOutputsParams(**constraint)):
        completion = complete(text_llm, structured_outputs=structured, max_tokens=40)
        assert matches(completion.text), completion.text


def test_a_custom_logits_processor(text_llm: OmniLLM, greedy: CompletionOutput) -> None:
    assert set(complete(text_llm, extra_args={"keep": [50, 51]}).token_ids) <= {50, 51}
    assert complete(text_llm).token_ids == greedy.token_ids
    with pytest.raises(InvalidRequestError, match="keep must be a list"):
        generate(text_llm, extra_args={"keep": 50})


def test_prefix_caching_of_a_text_pipeline(text_llm: OmniLLM) -> None:
    prompt = {"prompt_token_ids": list(range(20, 120))}
    first, again = (generate(text_llm, prompt) for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 96)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_lora_equals_merged_weights_in_a_mixed_batch(text_llm: OmniLLM, tiny_qwen3: Path, tmp_path: Path) -> None:
    adapters, expected = [], [complete(text_llm).token_ids]
    for seed in (1, 2):
        folder = write_adapter(tiny_qwen3, tmp_path / f"adapter{seed}", seed)
        merged = HFTextOracle(merge_adapter(tiny_qwen3, folder, tmp_path / f"merged{seed}"))
        expected.append(merged.generate(PROMPT, max_tokens=NUM_TOKENS).token_ids)
        adapters.append(LoRARequest(f"adapter{seed}", seed, str(folder)))
    assert len({tuple(tokens) for tokens in expected}) == 3
    params = [{"temperature": 0.0, "max_tokens": NUM_TOKENS}]
    adapters_by_prompt = [None, *adapters, None]
    outputs = text_llm.generate([PROMPT] * 4, params, use_tqdm=False, lora_request=adapters_by_prompt)
    assert [output.outputs[0].token_ids for output in outputs] == [*expected, expected[0]]
    assert generate(text_llm, lora_request=adapters[0]).outputs[0].token_ids == expected[1]
    assert complete(text_llm).token_ids == expected[0]
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        text_llm.generate([PROMPT] * 2, params, use_tqdm=False, lora_request=adapters[:1])


def test_an_adapter_of_the_thinker(qwen2_5_llm: OmniLLM, tiny_qwen2_5_omni: Path, tmp_path: Path) -> None:
    """In a batch with requests without one; the speech is that of the adapted text."""
    folder = write_adapter(tiny_qwen2_5_omni, tmp_path / "adapter", 1, prefix="thinker.model.")
    merged = merge_adapter(tiny_qwen2_5_omni, folder, tmp_path / "merged")
    prompt = make_prompt(tiny_qwen2_5_omni, "text")
    params = [{"temperature": 0.0, "max_tokens": NUM_TOKENS}, {"temperature": 0.0, "max_tokens": 12}, {"seed": 7}]
    adapters_by_prompt = [None, LoRARequest("adapter", 1, str(folder)), None]
    outputs = qwen2_5_llm.generate([prompt] * 3, params, use_tqdm=False, lora_request=adapters_by_prompt)
    (base, adapted, same), (speech_base, speech_adapted, speech_same) = outputs[::2], outputs[1::2]
    for checkpoint, output in ((tiny_qwen2_5_omni, base), (merged, adapted)):
        expected = HFOracle(checkpoint).generate(prompt, thinker_max_tokens=NUM_TOKENS, talker_max_tokens=12)
        assert output.outputs[0].token_ids == expected.thinker_token_ids
    assert base.outputs[0].token_ids == same.outputs[0].token_ids != adapted.outputs[0].token_ids
    speech, other, again = (o.multimodal_output["audio"] for o in (speech_base, speech_adapted, speech_same))
    torch.testing.assert_close(again, speech, rtol=0, atol=1e-4)
    assert other.shape != speech.shape or not torch.allclose(other, speech, atol=1e-2)


def test_an_adapter_needs_enable_lora(talking_llm: OmniLLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="LoRA is not enabled"):
        talking_llm.generate(PROMPT, use_tqdm=False, lora_request=LoRARequest("a", 1, str(tmp_path)))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"structured_outputs": {"regex": "[ab"}}, "regex"),
        ({"structured_outputs": {"regexp": "a"}}, "'regexp' in structured_outputs; did you mean 'regex'"),
        ({"structured_outputs": {}}, "structured outputs constraint"),
        ({"logprobs": -5}, "logprobs"),
        ({"allowed_token_ids": [40000]}, "allowed_token_ids"),
        ({"logit_bias": {99999: 1.0}}, "99999"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stop": [""]}, "stop"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"top_p": 1.5}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"n": 0}, "n must"),
    ],
)
def test_an_error_names_a_bad_value(params: dict[str, Any], words: str, text_llm: OmniLLM) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        generate(text_llm, **params)


def test_other_requests_are_not_affected(text_llm: OmniLLM, greedy: CompletionOutput) -> None:
    assert complete(text_llm).token_ids == greedy.token_ids
    assert isinstance(text_llm.generate(PROMPT, [SamplingParams(max_tokens=2)], use_tqdm=False), list)


def test_what_vllm_has_besides_generation(text_llm: OmniLLM, tiny_qwen3: Path) -> None:
    assert text_llm.get_tokenizer().encode("a hen") == AutoTokenizer.from_pretrained(tiny_qwen3).encode("a hen")
    assert text_llm.get_default_sampling_params().temperature is not None
    assert text_llm.get_world_size() == text_llm.get_world_size(include_dp=False) == 1
    with pytest.raises(AttributeError, match="no attribute 'beam_search'; it is of vLLM's LLM alone"):
        text_llm.beam_search  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(text_llm, "encode") and not hasattr(text_llm, "no_such_name")
    with pytest.raises(InvalidControlError, match="open the pipeline with log_stats=True"):
        text_llm.get_metrics()
    with pytest.raises(InvalidControlError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        text_llm.apply_model(len)


def test_prompts_are_enqueued_and_waited_for_later(text_llm: OmniLLM, greedy: CompletionOutput) -> None:
    params = [{"temperature": 0.0, "max_tokens": NUM_TOKENS}]
    assert text_llm.wait_for_completion() == []
    ids = text_llm.enqueue([PROMPT, "a hen"], params)
    ids += text_llm.enqueue_chat([{"role": "user", "content": "a fox"}], params, modalities=["text"])
    between = complete(text_llm)
    with pytest.raises(InvalidRequestError, match="prompt 1: "):
        text_llm.enqueue([PROMPT, {"prompt_token_ids": [99999]}], params)
    with pytest.raises(TypeError, match="modality"):
        text_llm.enqueue_chat([{"role": "user", "content": "a fox"}], params, modality="text")
    outputs = text_llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids and len({*ids}) == 3
    assert outputs[0].outputs[0].token_ids == between.token_ids == greedy.token_ids
    (chat,) = text_llm.chat([{"role": "user", "content": "a fox"}], params, use_tqdm=False)
    assert outputs[2].outputs[0].token_ids == chat.outputs[0].token_ids
    assert text_llm.wait_for_completion() == []


def test_prompts_that_nobody_reads_make_room_for_others(text_llm: OmniLLM) -> None:
    orchestrator = text_llm._pipeline.orchestrator
    with mock.patch.object(orchestrator._admission, "_limit", 2):
        ids = text_llm.enqueue(["a hen"] * 6, [{"max_tokens": 1}])
        text_llm._enqueued[0]._feeder.join()
    assert complete(text_llm)
    assert [output.request_id for output in text_llm.wait_for_completion(use_tqdm=False)] == ids


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_errors_of_prompts_that_were_enqueued(text_llm: OmniLLM, on_error: Literal["raise", "return"]) -> None:
    """They are numbered over all calls."""
    text_llm.pause_generation(mode="wait")
    text_llm.enqueue(PROMPT, [{"max_tokens": 2}])
    ids = text_llm.enqueue([PROMPT, PROMPT], [{"max_tokens": 2}])
    text_llm._enqueued[1]._feeder.join()
    assert text_llm._pipeline.orchestrator.abort_external({ids[1]}).result() == 1
    text_llm.resume_generation()
    if on_error == "raise":
        with pytest.raises(RequestAbortedError, match="prompt 2: ") as raised:
            text_llm.wait_for_completion(use_tqdm=False)
        assert len(raised.value.results) == 2
    else:
        outputs = text_llm.wait_for_completion(use_tqdm=False, on_error="return")
        assert [output.error is None for output in outputs] == [True, True, False]
    assert text_llm.wait_for_completion() == []


def test_a_mistyped_parameter_of_a_stage_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown sampling parameter 'temperatur'; did you mean 'temperature'\?"):
        make_sampling_params({"temperatur": 1.0})
