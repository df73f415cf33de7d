# SPDX-License-Identifier: Apache-2.0
"""Parameters of function stages: checked in the caller's process, and the same in the stage."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.entrypoints.fake_pipelines import running
from tests.entrypoints.spoken_functions import NUM_SAMPLES, SPEAKING, WRITING_STAGE, SpeakingStage, level
from tests.orchestrator.pipelines import make_config
from vllm_omni import OmniLLM
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.kinds.parameters import FunctionParameters, load_function_parameters


def make_reader(**defaults: Any) -> FunctionParameters:
    config = make_config(WRITING_STAGE, SPEAKING | {"default_sampling_params": defaults})
    (reader,) = load_function_parameters(config).values()
    return reader


def test_a_request_replaces_defaults() -> None:
    reader = make_reader(speed=1.5, pitch=2)
    assert reader.read(None, {}) == {"speed": 1.5, "pitch": 2}
    assert reader.read({"pitch": 3}, {"speaker": "bob", "other": object(), "speed": 2}) == {
        "pitch": 3, "voice": "Bob", "speed": 2.0
    }  # fmt: skip
    assert reader.read({"voice": "ANN"}, {"speaker": "bob"})["voice"] == "Ann"
    assert reader.prompt_fields == {"speaker", "speed", "language", "pitch"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spede": 1.0}, r"unknown parameter 'spede' for stage 'voice'; did you mean 'speed'\? \(known: voice, speed"),
        ({"speed": 9.0}, r"^speed: Expected `float` <= 2.0 \(stage 'voice'\)"),
        ({"speed": "fast"}, r"^speed: Expected `float`, got `str`"),
        ({"speed": math.nan}, "speed nan: must be a finite number"),
        ({"pitch": None}, "^pitch: Expected `int`, got `null`"),
        ({"voice": "Eve"}, "unknown voice 'Eve'; there are Ann, Bob"),
        ({"voice": 3}, "^voice: Expected `str`"),
        ({"pitch": 1 << 70}, "pitch|too large"),
        ([1.0], "stage 'voice' takes a dict of its parameters"),
    ],
)
def test_wrong_parameters_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make_reader().read(given, {})


def test_the_default_voice_is_the_first() -> None:
    assert make_reader().voices == ("ann", "bob")
    assert make_reader(voice="Bob").voices == ("bob", "ann")


@pytest.mark.parametrize(
    ("defaults", "message"),
    [({"speed": 0}, "speed: Expected `float` >= 0.5"), ({"tone": 1}, "unknown parameter 'tone'")],
)
def test_wrong_defaults_are_an_error_of_the_configuration(defaults: dict[str, Any], message: str) -> None:
    with pytest.raises(StageConfigError, match=f"stage 1 .voice.: default_sampling_params: {message}"):
        make_reader(**defaults)


class NeedsMore(msgspec.Struct):
    pitch: int


def test_every_parameter_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeakingStage, "parameters", NeedsMore)
    with pytest.raises(StageConfigError, match="has voices, but no parameter 'voice'"):
        make_reader()
    monkeypatch.setattr(SpeakingStage, "voices", lambda: ())
    with pytest.raises(StageConfigError, match="missing required field `pitch`"):
        make_reader()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniLLM]:
    edges = [{"from": 0, "to": 1, "unit": "sentences"}]
    with running(OmniLLM, tmp_path_factory.mktemp("config"), [WRITING_STAGE, SPEAKING], edges=edges) as llm:
        yield llm


def test_a_pipeline_of_functions(llm: OmniLLM) -> None:
    assert llm.voices == ["ann", "bob"]
    prompts: Any = [
        {"prompt": "Hello", "modalities": ["audio"]},
        {"prompt": "Hi", "modalities": ["audio"], "additional_information": {"speaker": "bob", "pitch": 1}},
    ]
    outputs = llm.generate(prompts, [None, {"speed": 2.0}], use_tqdm=False)
    for output, length, voice in zip(outputs, (5, 2), ("Ann", "Bob"), strict=True):
        audio = output.multimodal_output["audio"]
        assert audio.tolist() == [level(voice)] * (length * NUM_SAMPLES // 2)


def test_wrong_parameters_reach_no_stage(llm: OmniLLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"speed: Expected `float` <= 2\.0"):
        llm.generate("Hello", [None, {"speed": 3.0}], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="unknown voice 'eve'; there are Ann, Bob"):
        llm.generate({"prompt": "x", "additional_information": {"speaker": "eve"}}, use_tqdm=False)


def test_speech_is_made_of_whole_sentences(llm: OmniLLM) -> None:
    parts = ["Well, as you see, ", "it works. ", "Mr. Fox said so! ", "The end"]
    (output,) = llm.generate({"prompt": "".join(parts), "modalities": ["audio"]}, use_tqdm=False)
    audio = output.multimodal_output["audio"]
    ends = (audio.diff().nonzero().flatten() + 1).tolist()
    assert [stop - start for start, stop in zip([0, *ends], [*ends, len(audio)], strict=True)] == [
        len(part) * NUM_SAMPLES for part in parts
    ]
