# SPDX-License-Identifier: Apache-2.0
"""The store of uploaded voices alone: limits, owners and expiry."""

import asyncio

import numpy as np
import pytest
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

from tests.clock import pass_time
from vllm_omni.entrypoints.openai.server_args import ServerLimits
from vllm_omni.entrypoints.openai.voice_store import VoiceStore

SOUND = (np.zeros(24000, np.float32), 24000.0)
ONE, OTHER = b"one", b"other"


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


def test_a_kept_recording_cannot_be_changed() -> None:
    async def main() -> None:
        store = VoiceStore(ServerLimits())
        add(store, ONE, "a")
        stored = store.find("A", ONE)
        assert stored is not None
        with pytest.raises(ValueError, match="read-only"):
            stored.sound[0][0] = 1.0

    asyncio.run(main())
