# SPDX-License-Identifier: Apache-2.0
"""What the stages hand over: rows, positions, voices, codes, and requests with nothing to say."""

from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import TalkerToToken2Wav, ThinkerToTalker
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import TALKER_INPUT
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS

from .helpers import Case

PROMPT = [30, 31, 32]


@pytest.fixture(scope="module")
def to_talker(config: PretrainedConfig) -> ThinkerToTalker:
    return ThinkerToTalker(config)


@pytest.fixture(scope="module")
def to_token2wav(config: PretrainedConfig) -> TalkerToToken2Wav:
    return TalkerToToken2Wav(config)


def window(tokens: list[int], num_rows: int, start: int = 0, is_last: bool = True) -> dict[int, StageOutput]:
    """Row `i` is filled with `i`."""
    tensors = {TALKER_INPUT: torch.arange(num_rows).float()[:, None].expand(-1, 8)} if num_rows else {}
    completions = [Completion(token_ids=tokens)]
    return {
        0: StageOutput(
            request_id="0", stage_id=0, completions=completions, tensors=tensors, start=start, is_last=is_last
        )
    }


def request(**fields: Any) -> StageRequest:
    return StageRequest(request_id="0", prompt_token_ids=PROMPT, **fields)


def process(processor: Any, sources: dict[int, StageOutput], **fields: Any) -> StageInput:
    made = processor.process(request(**fields), sources)
    assert made is not None
    return made


def test_a_whole_reply(to_talker: ThinkerToTalker, config: PretrainedConfig) -> None:
    made = process(to_talker, window([40, 41, 42, 43], num_rows=6))
    information, talker = made.additional_information, config.talker_config
    assert information["prompt_rows"][:, 0].tolist() == [0, 1, 2]
    assert information["reply_rows"][:, 0].tolist() == [3, 4, 5]
    assert information["speaker"] == "chelsie"
    assert information["mrope_positions"].tolist() == [[0, 1, 2, 3, 4]] * 3
    assert made.prompt_token_ids == [talker.tts_codec_mask_token_id] * 3 + [
        talker.tts_codec_pad_token_id,
        talker.tts_codec_start_token_id,
    ]
    assert sorted(made.stop_token_ids) == sorted([talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id])
    assert made.num_ready_tokens is None


def test_a_reply_in_windows(to_talker: ThinkerToTalker) -> None:
    first = process(to_talker, window([40, 41], num_rows=4, is_last=False))
    assert first.num_ready_tokens == 5, "the prompt, and a step that samples the first code"
    assert first.additional_information["reply_rows"].shape[0] == 1
    second = process(to_talker, window([42, 43, 44], num_rows=3, start=2, is_last=False))
    assert second.num_ready_tokens == 8, "a token for each row of text behind the first"
    assert list(second.additional_information) == ["reply_rows"]
    assert second.prompt_token_ids == []
    last = process(to_talker, window([45], num_rows=1, start=5))
    assert last.num_ready_tokens is None
    assert to_talker.process(request(), window([], num_rows=0, start=5)) is None


def test_a_reply_of_one_token_has_no_speech(to_talker: ThinkerToTalker) -> None:
    assert to_talker.process(request(), window([40], num_rows=3)) is None
    assert to_talker.process(request(), window([40, 41], num_rows=4)) is not None


def test_an_error_names_a_thinker_without_rows(to_talker: ThinkerToTalker) -> None:
    with pytest.raises(ValueError, match="engine_output_type must be 'latent'"):
        to_talker.process(request(), window([40, 41], num_rows=0))


@pytest.mark.parametrize("speaker", ["Ethan", "ethan", "ETHAN"])
def test_speakers_are_found_whatever_their_case(
    speaker: str, to_talker: ThinkerToTalker, to_token2wav: TalkerToToken2Wav
) -> None:
    made = process(to_talker, window([40, 41], num_rows=4), options={"speaker": speaker})
    assert made.additional_information["speaker"] == "ethan"
    made = process(to_token2wav, window([1, 2], num_rows=0), options={"speaker": speaker})
    assert made.additional_information["speaker"] == "ethan"


def test_the_voices_are_those_of_the_checkpoint_and_the_default_one_is_first(
    to_talker: ThinkerToTalker,
) -> None:
    assert to_talker.voices == ("chelsie", "ethan", "aiden")
    assert process(to_talker, window([40, 41], num_rows=4)).additional_information["speaker"] == to_talker.voices[0]


@pytest.mark.parametrize("speaker", ["Nobody", 7])
def test_an_unknown_speaker_is_refused_with_the_known_ones(speaker: Any, to_talker: ThinkerToTalker) -> None:
    with pytest.raises(InvalidRequestError, match="aiden, chelsie, ethan") as raised:
        to_talker.process(request(options={"speaker": speaker}), window([40, 41], num_rows=4))
    assert raised.value.request_id == "0"
    with pytest.raises(InvalidRequestError, match="aiden, chelsie, ethan"):
        to_talker.validate(request(options={"speaker": speaker}))
    to_talker.validate(request(options={}))


@pytest.mark.parametrize("kind", [*PROMPT_KINDS, *HARD_KINDS])
def test_positions_equal_hf(
    kind: str, to_talker: ThinkerToTalker, cases: dict[str, Case], config: PretrainedConfig, oracle: HFOracle
) -> None:
    case = cases[kind]
    made = to_talker.process(case.stage_request(), {0: case.thinker_output(config)})
    if made is None:
        assert len(case.expected.thinker_token_ids) == 1
        return
    metadata, ids = case.mm_metadata(), case.expected.talker_inputs["input_text_ids"]
    expected, _ = oracle.model.talker.get_rope_index(
        ids,
        metadata.get("image_grid_thw"),
        metadata.get("video_grid_thw"),
        torch.ones_like(ids),
        case.uses_audio_in_video,
        metadata.get("audio_feature_lengths"),
        metadata.get("second_per_grid_ts"),
    )
    ours = made.additional_information["mrope_positions"]
    assert ours.dtype == torch.int64
    assert torch.equal(ours, expected[:, 0].long())


def test_tokens_that_are_no_codes_are_left_out(to_token2wav: TalkerToToken2Wav, config: PretrainedConfig) -> None:
    talker = config.talker_config
    tokens = [3, 0, talker.tts_codec_mask_token_id, 255, talker.vocab_size - 1, talker.tts_codec_end_token_id]
    made = process(to_token2wav, window(tokens, num_rows=0))
    assert made.additional_information["codes"].tolist() == [3, 0, 255]
    assert made.additional_information["codes"].dtype == torch.int64
    assert made.prompt_token_ids == [0] * 3


def test_the_seed_of_the_vocoder_is_its_own(to_token2wav: TalkerToToken2Wav) -> None:
    codes = window([1, 2], num_rows=0)
    assert "seed" not in process(to_token2wav, codes).additional_information
    assert "seed" not in process(to_token2wav, codes, sampling_params=SamplingParams()).additional_information
    made = process(to_token2wav, codes, sampling_params=SamplingParams(seed=0))
    assert made.additional_information["seed"] == 0


def test_no_codes_are_no_work_for_the_vocoder(to_token2wav: TalkerToToken2Wav, config: PretrainedConfig) -> None:
    end = config.talker_config.tts_codec_end_token_id
    assert to_token2wav.process(request(), window([end], num_rows=0)) is None
    assert to_token2wav.process(request(), window([end], num_rows=0, is_last=False)) is None
    assert to_token2wav.process(request(), {0: StageOutput(request_id="0", stage_id=0)}) is None
    assert to_token2wav.empty_output()["audio"].shape == (0,)


@pytest.mark.parametrize("tokens", [[], ["end"]])
def test_the_end_reaches_the_vocoder_without_codes(
    tokens: list[Any], to_token2wav: TalkerToToken2Wav, config: PretrainedConfig
) -> None:
    ids = [config.talker_config.tts_codec_end_token_id for _ in tokens]
    made = process(to_token2wav, window(ids, num_rows=0, start=25))
    assert made.additional_information["codes"].shape == (0,)
    assert made.prompt_token_ids == [0], "an engine takes no empty prompt"


def test_context_is_not_vocoded_twice(to_token2wav: TalkerToToken2Wav) -> None:
    sources = window([7, 8, 9], num_rows=0, start=4)
    sources[0].context = 2
    assert process(to_token2wav, sources).additional_information["codes"].tolist() == [9]
