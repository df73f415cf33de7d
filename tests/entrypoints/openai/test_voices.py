# SPDX-License-Identifier: Apache-2.0
"""Names of voices: the model's own, OpenAI's, and those of `--voice-map`."""

import pytest
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.voices import OPENAI_VOICES, Voices


def speaker(voices: Voices, name: str | None) -> str | None:
    return voices.read(name, "voice")


def test_the_models_own_voices_are_found_in_any_case() -> None:
    voices = Voices(["ethan", "aiden"], {})
    assert [speaker(voices, name) for name in ("ethan", "Aiden", "default", None)] == ["ethan", "aiden", None, None]


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], [f"voice{i}" for i in range(40)]])
def test_openais_voices_are_spread_over_those_of_any_model(names: list[str]) -> None:
    voices = Voices(names, {})
    targets = [speaker(voices, name) for name in OPENAI_VOICES]
    assert targets == [names[i % len(names)] for i in range(len(OPENAI_VOICES))]
    assert voices.map == dict(zip(OPENAI_VOICES, targets, strict=True))
    assert speaker(voices, "Alloy") == names[0]


def test_a_model_without_voices_has_one_for_all_of_openais() -> None:
    voices = Voices([], {"narrator": "default"})
    assert {speaker(voices, name) for name in (*OPENAI_VOICES, "narrator", "default", None)} == {None}


def test_a_models_own_voice_of_the_same_name_wins() -> None:
    voices = Voices(["ethan", "coral"], {})
    assert speaker(voices, "coral") == "coral" and "coral" not in voices.map
    assert speaker(voices, "ballad") == "ethan"  # the others do not change


def test_a_voice_map_changes_only_its_own_names() -> None:
    voices, given = Voices(["ethan", "aiden"], {}), Voices(["ethan", "aiden"], {"Alloy": "Aiden", "narrator": "ethan"})
    assert given.map == {**voices.map, "alloy": "aiden", "narrator": "ethan"}


@pytest.mark.parametrize(
    ("voice_map", "words"),
    [
        ({"alloy": "nobody"}, "unknown voice 'nobody'; the model has ethan, aiden, default"),
        ({"alloy": "ash"}, "unknown voice 'ash'"),
        ({"Ethan": "aiden"}, "'ethan' is a voice of the model"),
        ({"default": "aiden"}, "'default' is a voice of the model"),
    ],
)
def test_a_wrong_map_is_refused(voice_map: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Voices(["ethan", "aiden"], voice_map)


@pytest.mark.parametrize(("names", "known"), [(["ethan", "aiden"], "ethan, aiden, alloy"), ([], "default, alloy")])
def test_the_error_of_an_unknown_voice_lists_the_known_ones(names: list[str], known: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"unknown voice 'Nobody'; there are {known}") as raised:
        Voices(names, {}).read("Nobody", "audio.voice")
    assert raised.value.parameter == "audio.voice"
