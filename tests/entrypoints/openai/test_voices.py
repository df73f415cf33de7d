# SPDX-License-Identifier: Apache-2.0
"""Names of voices: the model's own, OpenAI's, and those of `--voice-map`; uploaded voices: limits, owners, expiry."""

import asyncio

import numpy as np
import pytest
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

from tests.clock import pass_time
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.server_args import ServerLimits
from vllm_omni.entrypoints.openai.voices import OPENAI_VOICES, Voices, VoiceStore

SOUND = (np.zeros(24000, np.float32), 24000.0)
ONE, OTHER = b"one", b"other"


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


def add(store: VoiceStore, owner: bytes, name: str) -> str:
    return store.add(owner, (SOUND[0].copy(), SOUND[1]), name=name, consent="I agree.").id


def test_a_voice_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        store = VoiceStore(ServerLimits(voice_expires_after_s=3600))
        voice_id = add(store, ONE, "a")
        assert store.get("a", ONE).id == voice_id
        await pass_time(3600, monkeypatch)
        with pytest.raises(VLLMNotFoundError, match="may have expired"):
            store.get("a", ONE)
        deleted = add(store, ONE, "a")
        store.delete(deleted, ONE)
        kept = add(store, ONE, "a")
        assert store.voices(ONE)[0].id == kept

    asyncio.run(main())


def test_one_key_cannot_take_the_room_of_another() -> None:
    async def main() -> None:
        for limits in (ServerLimits(max_stored_voices=2), ServerLimits(max_stored_voice_bytes=2 * 96_000)):
            store = VoiceStore(limits)
            for name in ("a", "b"):
                add(store, ONE, name)
            with pytest.raises(VLLMValidationError, match="--max-stored-voice"):
                add(store, ONE, "c")
            add(store, OTHER, "a")
            store.delete("b", ONE)
            add(store, ONE, "c")
            assert [voice.name for voice in store.voices(ONE)] == ["a", "c"]

    asyncio.run(main())


def test_the_voices_of_all_keys_are_limited() -> None:
    async def main() -> None:
        store = VoiceStore(ServerLimits(max_total_stored_voice_bytes=2 * 96_000))
        add(store, ONE, "a")
        add(store, OTHER, "a")
        with pytest.raises(OmniHTTPError, match="--max-total-stored-voice-bytes"):
            add(store, ONE, "b")
        store.delete("a", OTHER)
        add(store, ONE, "b")
        assert [voice.name for voice in store.voices(ONE)] == ["a", "b"]

    asyncio.run(main())


def test_an_upload_without_a_key_says_that_all_clients_share_it() -> None:
    async def main() -> None:
        store = VoiceStore(ServerLimits())
        add(store, b"", "a")
        add(store, ONE, "a")
        assert [store.get("a", owner).shared for owner in (b"", ONE)] == [True, False]

    asyncio.run(main())


def test_a_kept_recording_cannot_be_changed() -> None:
    async def main() -> None:
        store = VoiceStore(ServerLimits())
        add(store, ONE, "a")
        stored = store.find("A", ONE)
        assert stored is not None
        with pytest.raises(ValueError, match="read-only"):
            stored.sound[0][0] = 1.0

    asyncio.run(main())
