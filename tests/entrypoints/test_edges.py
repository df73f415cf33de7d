# SPDX-License-Identifier: Apache-2.0
"""Boundary cases: the shortest and the longest reply, speech and prompt, and one beyond."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.entrypoints.fake_pipelines import make_chat
from vllm_omni import OmniLLM
from vllm_omni.errors import InvalidRequestError
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import make_prompt

GROUP = "llm"
MAX_MODEL_LEN = 1024
SAMPLES_PER_FRAME = 1920


@pytest.fixture(scope="module")
def prompt(tiny_qwen3_omni_moe: Path) -> dict[str, Any]:
    return make_prompt(tiny_qwen3_omni_moe, "text")


@pytest.fixture(scope="module")
def end_of_speech(tiny_qwen3_omni_moe: Path) -> int:
    return AutoConfig.from_pretrained(tiny_qwen3_omni_moe).talker_config.codec_eos_token_id


@dataclass
class Model:
    llm: OmniLLM
    prompt: dict[str, Any]
    end_of_speech: int


@pytest.fixture(params=["qwen2_5", "qwen3"])
def either(request: pytest.FixtureRequest) -> Model:
    """Each of the two models."""
    fixtures = {"qwen2_5": ("qwen2_5_llm", "tiny_qwen2_5_omni"), "qwen3": ("talking_llm", "tiny_qwen3_omni_moe")}
    llm, checkpoint = (request.getfixturevalue(name) for name in fixtures[request.param])
    talker = AutoConfig.from_pretrained(checkpoint).talker_config
    end = talker.tts_codec_end_token_id if request.param == "qwen2_5" else talker.codec_eos_token_id
    return Model(llm, make_prompt(checkpoint, "text"), end)


def params(text: int = 6, speech: int = 12, **talker: Any) -> list[dict[str, Any] | None]:
    """Greedy, with limits of tokens and codes."""
    thinker = {"temperature": 0.0, "max_tokens": text}
    return [thinker, {"temperature": 0.0, "max_tokens": speech, "detokenize": False, **talker}, None]


def generate_both_ways(
    llm: OmniLLM, prompt: Any, params: list[dict[str, Any] | None]
) -> tuple[OmniRequestOutput, OmniRequestOutput]:
    """Text and speech, after checking that streaming gives the same."""
    text, speech = llm.generate(prompt, params, use_tqdm=False)
    *_, end = llm.generate(prompt, params, stream=True)
    for whole, streamed in zip((text, speech), end.outputs, strict=True):  # type: ignore[union-attr]
        assert streamed.outputs[0].token_ids == whole.outputs[0].token_ids
        assert streamed.outputs[0].finish_reason == whole.outputs[0].finish_reason
    audio, streamed_audio = (output.multimodal_output["audio"] for output in (speech, end.outputs[1]))  # type: ignore[union-attr]
    torch.testing.assert_close(streamed_audio, audio, rtol=0, atol=1e-4)
    return text, speech


def assert_silent(speech: OmniRequestOutput) -> None:
    audio = speech.multimodal_output["audio"]
    assert (audio.dtype, tuple(audio.shape)) == (torch.float32, (0,))
    assert speech.finished and speech.outputs[0].finish_reason == "stop"


def num_frames(speech: OmniRequestOutput) -> int:
    return speech.stage_metrics[2].num_input_tokens


def test_a_reply_of_one_token_has_no_speech(either: Model) -> None:
    text, speech = generate_both_ways(either.llm, either.prompt, params(text=1))
    assert len(text.outputs[0].token_ids) == 1 and text.outputs[0].finish_reason == "length"
    assert_silent(speech)


def test_a_reply_of_two_tokens_equals_hf(
    talking_llm: OmniLLM, prompt: dict[str, Any], tiny_qwen3_omni_moe: Path
) -> None:
    _, speech = generate_both_ways(talking_llm, prompt, params(text=2, repetition_penalty=1.05))
    expected = HFOracle(tiny_qwen3_omni_moe).generate(prompt, thinker_max_tokens=2, talker_max_tokens=12)
    torch.testing.assert_close(speech.multimodal_output["audio"], expected.audio, rtol=0, atol=1e-4)


def test_a_talker_that_ends_at_once_has_no_speech(either: Model) -> None:
    text, speech = generate_both_ways(either.llm, either.prompt, params(logit_bias={either.end_of_speech: 100.0}))
    assert len(text.outputs[0].token_ids) == 6
    assert_silent(speech)


@pytest.mark.parametrize("limits", [{"stop_token_ids": list(range(128))}, {"speech": 1}])
def test_an_incomplete_frame_is_dropped(limits: dict[str, Any], talking_llm: OmniLLM, prompt: dict[str, Any]) -> None:
    """Qwen3-Omni completes a frame in the next step, which the last frame does not have."""
    _, speech = generate_both_ways(talking_llm, prompt, params(**limits))
    assert speech.stage_metrics[1].num_output_tokens == 1
    assert_silent(speech)


def test_a_silent_request_beside_another(talking_llm: OmniLLM, prompt: dict[str, Any]) -> None:
    """Two concurrent calls, because one call has one set of limits."""
    silent = talking_llm.generate(prompt, params(text=1), stream=True)
    next(silent)
    _, speech = generate_both_ways(talking_llm, prompt, params())
    assert num_frames(speech) == 11
    *_, end = silent
    assert_silent(end.outputs[1])  # type: ignore[union-attr]


def test_more_than_300_frames_up_to_the_context_limit(
    talking_llm: OmniLLM, prompt: dict[str, Any], end_of_speech: int
) -> None:
    """A talker whose max_tokens exceeds its context ends at the end of the context, like any vLLM request."""
    endless = {"logit_bias": {end_of_speech: -100.0}, "repetition_penalty": 1.05}
    (speech,) = talking_llm.generate(
        make_chat(690) | {"modalities": ["audio"]}, params(text=3, speech=5000, **endless), use_tqdm=False
    )
    talker = speech.stage_metrics[1]
    assert talker.num_input_tokens + talker.num_output_tokens == MAX_MODEL_LEN
    assert num_frames(speech) == talker.num_output_tokens - 1 > 300
    assert speech.outputs[0].finish_reason == "length"
    audio = speech.multimodal_output["audio"]
    assert 0 <= num_frames(speech) * SAMPLES_PER_FRAME - audio.shape[0] < 2 * SAMPLES_PER_FRAME
    assert audio.isfinite().all() and audio[-SAMPLES_PER_FRAME:].std() > 1e-3


def test_the_longest_prompt_and_one_token_more(talking_llm: OmniLLM) -> None:
    longest = make_chat(MAX_MODEL_LEN - 1) | {"modalities": ["text"]}
    (text,) = talking_llm.generate(longest, params(text=50), use_tqdm=False)
    ids = text.prompt_token_ids or []
    assert len(ids) == MAX_MODEL_LEN - 1
    assert len(text.outputs[0].token_ids) == 1 and text.outputs[0].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match=r"1024.*1025"):
        talking_llm.generate({"prompt_token_ids": [*ids, 5, 5]}, params(), use_tqdm=False)


def test_the_longest_prompt_with_speech_and_one_token_more(talking_llm: OmniLLM) -> None:
    """The talker's prompt has more rows than the thinker's if there is no system message, which it would omit."""
    longest = make_chat(MAX_MODEL_LEN - 8)
    _, speech = generate_both_ways(talking_llm, longest, params())
    talker = speech.stage_metrics[1]
    assert (talker.num_input_tokens, talker.num_output_tokens) == (MAX_MODEL_LEN - 2, 2)
    with pytest.raises(InvalidRequestError, match=r"stage 1 \(talker\).*1024.*1025") as error:
        talking_llm.generate([longest, make_chat(MAX_MODEL_LEN - 5)], params(), use_tqdm=False)
    assert [output.final_output_type for output in error.value.results] == ["text", "audio"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"additional_information": {"speaker": "nobody"}}, "unknown speaker 'nobody'.*aiden, chelsie, ethan"),
        ({"additional_information": {"speaker": 3}}, "unknown speaker 3"),
        ({"prompt": "user hello"}, "no assistant turn"),
    ],
)
def test_prompts_without_possible_speech_are_refused(
    change: dict[str, Any], words: str, talking_llm: OmniLLM, prompt: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as error:
        talking_llm.generate(prompt | change, params(), use_tqdm=False)
    assert error.value.stage_id is None
    (text,) = talking_llm.generate(prompt | change | {"modalities": ["text"]}, params(), use_tqdm=False)
    assert len(text.outputs[0].token_ids) > 0


@pytest.mark.parametrize(
    ("stage", "values", "words"),
    [
        (1, {"n": 2}, "n=2 for stage 'talker': only a final stage with text"),
        (2, {"n": 2}, "n=2 for stage 'code2wav'"),
        (1, {"temperature": -1.0}, "temperature"),
        (0, {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_values_of_any_stage_are_refused(
    stage: int, values: dict[str, Any], words: str, talking_llm: OmniLLM, prompt: dict[str, Any]
) -> None:
    given: list[dict[str, Any] | None] = [None, None, None]
    given[stage] = values
    with pytest.raises(InvalidRequestError, match=words):
        talking_llm.generate(prompt, given, use_tqdm=False)
