# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio v2 against HF's on the same weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.csm.prompts import sound
from tests.model_executor.models.speech import (
    CodecTests,
    CodeTests,
    SpeechCase,
    SpeechCodec,
    SpeechModel,
    check_refused,
    load_prompts,
    start_codec,
    start_speaker,
)
from vllm_omni.model_executor.models.higgs_audio_v2.tokenizer import CODEC
from vllm_omni.model_executor.prompt_processor import PromptProcessor
from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference

from .prompts import PROMPTS

MAX_ROWS = 60


@pytest.fixture(scope="module")
def prompt_processor(tiny_higgs_audio_v2: Path) -> PromptProcessor:
    return load_prompts("higgs_audio_v2", tiny_higgs_audio_v2)


class TestHiggsAudio(CodeTests, CodecTests):
    @pytest.fixture(scope="class")
    def cases(self, reference: HiggsAudioReference) -> dict[str, SpeechCase]:
        spoken = {name: reference.speak(prompt, MAX_ROWS) for name, prompt in PROMPTS.items()}
        return {name: SpeechCase(PROMPTS[name], speech.codes, speech.audio) for name, speech in spoken.items()}

    @pytest.fixture(scope="class")
    def model(
        self, tiny_higgs_audio_v2: Path, cases: dict[str, SpeechCase], prompt_processor: PromptProcessor
    ) -> Iterator[SpeechModel]:
        greedy = {"temperature": 0.0, "max_tokens": MAX_ROWS + 1}
        with start_speaker(tiny_higgs_audio_v2) as engine:
            yield SpeechModel(engine, prompt_processor, cases, greedy, num_fixed=2)

    @pytest.fixture(scope="class")
    def codec(self, tiny_higgs_audio_v2: Path, cases: dict[str, SpeechCase]) -> Iterator[SpeechCodec]:
        with start_codec("higgs_audio_v2", tiny_higgs_audio_v2 / CODEC, cases, num_held=4 + 10) as codec:
            yield codec

    def test_speech_ends_with_a_row_of_ends(self, model: SpeechModel, cases: dict[str, SpeechCase]) -> None:
        outputs = model.run(model.prompts)
        end = model.prompt_processor.hf_config.audio_stream_eos_id
        ended = [name for name, case in cases.items() if (case.codes[-1] == end).all()]
        assert 2 < len(ended) < len(outputs)
        for name, output in outputs.items():
            assert output.outputs[0].finish_reason == ("stop" if name in ended else "length")
            assert len(output.outputs[0].token_ids) == cases[name].num_frames + (name not in ended)


def test_the_prompt_is_that_of_hf(prompt_processor: PromptProcessor, reference: HiggsAudioReference) -> None:
    for prompt in PROMPTS.values():
        made = prompt_processor(prompt).additional_information  # type: ignore[arg-type]
        assert made["text_ids"].tolist() == reference.read_prompt(prompt)["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("information", "field"),
    [
        ({"ref_audio": sound(1, 0)}, "ref_text"),
        ({"ref_text": "yes"}, "ref_audio"),
        ({"ref_text": "", "ref_audio": sound(1, 0)}, "ref_text"),
        ({"ref_text": "yes", "ref_audio": sound(61, 0)}, "ref_audio"),
        ({"instructions": ""}, "instructions"),
        ({"instructions": "a <|AUDIO_OUT|>"}, "special tokens"),
        ({"speaker": "0"}, "'speaker'"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    information: dict[str, Any], field: str, prompt_processor: PromptProcessor
) -> None:
    check_refused(prompt_processor, information, field)


@pytest.mark.parametrize("limits", [{"ras_win_len": 17}, {"ras_win_len": 7.0}, {"ras_win_max_num_repeat": 0}])
def test_wrong_sampling_parameters_are_refused(limits: dict[str, Any], prompt_processor: PromptProcessor) -> None:
    given = {"ras_win_len": 7, "ras_win_max_num_repeat": 2}
    prompt_processor.validate(SamplingParams(extra_args=given))
    with pytest.raises(ValueError, match="ras_win_len is 1 to 16, and ras_win_max_num_repeat at least 1"):
        prompt_processor.validate(SamplingParams(extra_args=given | limits))
