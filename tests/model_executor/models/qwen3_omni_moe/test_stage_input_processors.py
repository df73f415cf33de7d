# SPDX-License-Identifier: Apache-2.0
"""What the stages hand over: selection of rows, positions, speakers, and requests with nothing to say."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from transformers import PretrainedConfig

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import StageRequest
from vllm_omni.model_executor.models.qwen3_omni_moe.stage_input_processors import (
    TalkerToCode2Wav,
    ThinkerToTalker,
    find_reply_start,
    find_user_positions,
)
from vllm_omni.model_executor.models.qwen3_omni_moe.talker_prompt import NUM_TAIL_ROWS
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import TALKER_INPUT
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.window import WindowState
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS

from .helpers import Case

START, SYSTEM, USER, ASSISTANT = 1, 2, 3, 4
TWO_TURNS = torch.tensor(
    [START, SYSTEM, 9, START, USER, 10, 11, START, ASSISTANT, 12, START, USER, 13, START, ASSISTANT, 14]
)


def test_user_turns_are_found_in_order() -> None:
    assert find_user_positions(TWO_TURNS, START, USER).tolist() == [3, 4, 5, 6, 10, 11, 12]
    assert find_user_positions(TWO_TURNS[:3], START, USER).tolist() == []


def test_the_reply_starts_at_the_last_assistant_turn() -> None:
    assert find_reply_start(TWO_TURNS, START, ASSISTANT) == 13
    assert find_reply_start(TWO_TURNS[:7], START, ASSISTANT) is None


@pytest.fixture(scope="module")
def to_talker(config: PretrainedConfig) -> ThinkerToTalker:
    return ThinkerToTalker(config)


def render(config: PretrainedConfig, *turns: tuple[int, list[int]]) -> list[int]:
    """Turns as (role id, content ids), and an assistant's header at the end."""
    newline = 20
    ids: list[int] = []
    for role, content in turns:
        ids += [config.im_start_token_id, role, newline, *content, config.im_end_token_id, newline]
    return [*ids, config.im_start_token_id, config.assistant_token_id, newline]


def thinker_output(config: PretrainedConfig, prompt_ids: list[int], num_generated: int) -> StageOutput:
    """Row `i` is filled with `i`."""
    rows = torch.arange(len(prompt_ids) + num_generated - 1).float()[:, None].expand(-1, 8)
    return StageOutput(
        request_id="0",
        stage_id=0,
        prompt_token_ids=prompt_ids,
        completions=[Completion(token_ids=list(range(num_generated)))],
        tensors={TALKER_INPUT: rows},
    )


def process(to_talker: ThinkerToTalker, output: StageOutput, **request: Any) -> Any:
    return to_talker.process(
        StageRequest(request_id="0", prompt_token_ids=output.prompt_token_ids, **request), {0: output}
    )


def test_earlier_replies_and_the_system_prompt_are_left_out(
    to_talker: ThinkerToTalker, config: PretrainedConfig
) -> None:
    system, user, assistant = config.system_token_id, config.user_token_id, config.assistant_token_id
    image = config.thinker_config.image_token_id
    prompt = render(config, (system, [30]), (user, [31, 32]), (assistant, [33]), (user, [image, 34]))
    made = process(to_talker, thinker_output(config, prompt, num_generated=5))
    information = made.additional_information
    first_user, second_user = range(6, 13), range(19, 26)
    assert information["user_rows"][:, 0].int().tolist() == [*first_user, *second_user]
    assert information["user_is_placeholder"].nonzero().flatten().tolist() == [len(first_user) + 3]
    assert information["reply_rows"][:, 0].int().tolist() == list(range(26, 26 + 3 + 4))
    assert len(made.prompt_token_ids) == 14 + NUM_TAIL_ROWS
    assert information["mrope_positions"].tolist() == [list(range(14 + NUM_TAIL_ROWS))] * 3


def test_the_end_of_speech_and_a_placeholder_that_is_never_sampled(
    to_talker: ThinkerToTalker, config: PretrainedConfig
) -> None:
    made = process(to_talker, thinker_output(config, render(config, (config.user_token_id, [30])), 3))
    talker = config.talker_config
    assert made.stop_token_ids == [talker.codec_eos_token_id]
    (placeholder,) = set(made.prompt_token_ids)
    assert placeholder != talker.codec_eos_token_id
    assert talker.text_config.vocab_size - 1024 <= placeholder < talker.text_config.vocab_size


def test_a_reply_of_one_token_has_no_speech(to_talker: ThinkerToTalker, config: PretrainedConfig) -> None:
    prompt = render(config, (config.user_token_id, [30]))
    assert process(to_talker, thinker_output(config, prompt, num_generated=1)) is None
    assert process(to_talker, thinker_output(config, prompt, num_generated=2)) is not None
    assert to_talker.empty_output()["codes"].shape == (0, config.talker_config.num_code_groups)


def as_stream(output: StageOutput) -> Iterator[StageOutput]:
    """The thinker's output as it comes, token by token: the row of a token with the next one."""
    tokens, rows = output.completions[0].token_ids, output.tensors[TALKER_INPUT]
    num_prompt = len(output.prompt_token_ids)
    for i, token in enumerate(tokens):
        new = slice(0, num_prompt) if i == 0 else slice(num_prompt + i - 1, num_prompt + i)
        yield msgspec.structs.replace(
            output,
            prompt_token_ids=output.prompt_token_ids if i == 0 else [],
            completions=[Completion(token_ids=[token])],
            tensors={TALKER_INPUT: rows[new]},
            is_last=i == len(tokens) - 1,
        )


@pytest.mark.parametrize("num_generated", [1, 2, 3, 9, 10])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_reply_in_windows_equals_the_whole(
    num_generated: int, size: int, to_talker: ThinkerToTalker, config: PretrainedConfig
) -> None:
    whole = thinker_output(config, render(config, (config.user_token_id, [30])), num_generated)
    expected = process(to_talker, whole)
    state = WindowState(WindowConfig(window_size=size, first_window_size=2))
    windows = [window for piece in as_stream(whole) for window in state.add(piece)]
    request = StageRequest(request_id="0", prompt_token_ids=whole.prompt_token_ids)
    made = [to_talker.process(request, {0: window}) for window in windows]
    if expected is None:
        assert made == [None]
        return
    first, *more = made
    assert first is not None and first.prompt_token_ids == expected.prompt_token_ids
    parts = [first, *(part for part in more if part is not None)]
    rows = torch.cat([part.additional_information["reply_rows"] for part in parts])
    assert torch.equal(rows, expected.additional_information["reply_rows"])
    # What has come is enough for a frame each: the header and the reply's first token are the prompt's.
    num_rows = torch.tensor([len(part.additional_information["reply_rows"]) for part in parts]).cumsum(0)
    ready = [None if part is None else part.num_ready_tokens for part in made]
    assert ready[:-1] == (len(first.prompt_token_ids) + num_rows - 4).tolist()[: len(ready) - 1]
    assert ready[-1] is None


@pytest.mark.parametrize("speaker", ["Ethan", "ethan", "ETHAN"])
def test_speakers_are_found_whatever_their_case(
    speaker: str, to_talker: ThinkerToTalker, config: PretrainedConfig
) -> None:
    output = thinker_output(config, render(config, (config.user_token_id, [30])), 3)
    made = process(to_talker, output, options={"speaker": speaker})
    assert made.additional_information["speaker_id"] == config.talker_config.speaker_id["ethan"]


def test_the_voices_are_those_of_the_checkpoint_and_the_default_one_is_first(
    to_talker: ThinkerToTalker, config: PretrainedConfig
) -> None:
    assert sorted(to_talker.voices) == sorted(config.talker_config.speaker_id)
    made = process(to_talker, thinker_output(config, render(config, (config.user_token_id, [30])), 3))
    assert made.additional_information["speaker_id"] == config.talker_config.speaker_id[to_talker.voices[0]]


@pytest.mark.parametrize("speaker", ["Nobody", 7])
def test_an_unknown_speaker_is_refused_with_the_known_ones(
    speaker: Any, to_talker: ThinkerToTalker, config: PretrainedConfig
) -> None:
    output = thinker_output(config, render(config, (config.user_token_id, [30])), 3)
    with pytest.raises(InvalidRequestError, match="ethan") as raised:
        process(to_talker, output, options={"speaker": speaker})
    assert raised.value.request_id == "0"


def test_a_prompt_without_an_assistant_turn_is_refused(to_talker: ThinkerToTalker, config: PretrainedConfig) -> None:
    with pytest.raises(InvalidRequestError, match="assistant"):
        process(to_talker, thinker_output(config, [30, 31, 32], num_generated=4))


@pytest.mark.parametrize("kind", [*PROMPT_KINDS, *HARD_KINDS])
def test_positions_equal_hf(
    kind: str, to_talker: ThinkerToTalker, cases: dict[str, Case], config: PretrainedConfig, oracle: HFOracle
) -> None:
    case = cases[kind]
    request = case.stage_request()
    made = to_talker.process(request, {0: case.thinker_output(config)})
    assert made is not None
    expected, _ = oracle.model.talker.get_rope_index(
        case.expected.talker_inputs["talker_input_ids"],
        request.mm_metadata.get("image_grid_thw"),
        request.mm_metadata.get("video_grid_thw"),
        case.expected.talker_inputs["attention_mask"],
        False,
        request.mm_metadata.get("audio_feature_lengths"),
        request.mm_metadata.get("second_per_grid_ts"),
    )
    ours = made.additional_information["mrope_positions"]
    assert ours.dtype == torch.int64
    assert torch.equal(ours, expected[:, 0].long())


def talker_output(**tensors: torch.Tensor) -> dict[int, StageOutput]:
    return {1: StageOutput(request_id="0", stage_id=1, tensors=tensors)}


def test_the_vocoder_gets_one_placeholder_for_each_frame(config: PretrainedConfig) -> None:
    codes = torch.randint(100, (7, 4))
    made = TalkerToCode2Wav(config).process(StageRequest(request_id="0"), talker_output(codes=codes))
    assert made is not None
    assert made.prompt_token_ids == [0] * 7
    assert torch.equal(made.additional_information["codes"], codes)


@pytest.mark.parametrize("tensors", [{}, {"codes": torch.empty(0, 4, dtype=torch.int64)}])
def test_no_frames_are_no_work_for_the_vocoder(tensors: dict[str, torch.Tensor], config: PretrainedConfig) -> None:
    to_code2wav = TalkerToCode2Wav(config)
    assert to_code2wav.process(StageRequest(request_id="0"), talker_output(**tensors)) is None
    assert to_code2wav.empty_output()["audio"].shape == (0,)
