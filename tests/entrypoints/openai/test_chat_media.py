# SPDX-License-Identifier: Apache-2.0
"""Transcripts of earlier speech."""

import time
from unittest import mock

import pytest
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai import chat_media
from vllm_omni.entrypoints.openai.chat_media import LIFETIME_S, Transcripts

OWNER = b"one"


def naming(audio_id: object, **fields: object) -> list[dict]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "audio": {"id": audio_id}, **fields}]


def test_an_audio_id_is_replaced_by_its_text() -> None:
    kept = Transcripts()
    expires_at = kept.keep("audio-1", "It is not.", OWNER)
    assert time.time() + LIFETIME_S - 60 < expires_at < time.time() + LIFETIME_S + 60
    assert kept.fill_in(naming("audio-1"), OWNER)[1] == {"role": "assistant", "content": "It is not."}
    # A message with its text needs no audio.
    assert kept.fill_in(naming("audio-2", content="Yes."), OWNER)[1]["content"] == "Yes."


@pytest.mark.parametrize("audio_id", ["audio-2", 7, None, ["audio-1"]])
def test_an_unknown_name_is_refused(audio_id: object) -> None:
    kept = Transcripts()
    kept.keep("audio-1", "It is not.", OWNER)
    assert kept.fill_in([{"role": "assistant", "audio": None}], OWNER)[0]["audio"] is None
    with pytest.raises(VLLMValidationError, match="send its transcript"):
        kept.fill_in(naming(audio_id), OWNER)


def test_an_unknown_audio_has_the_transcript_that_the_message_carries() -> None:
    """After a restart, or at another replica; a client cannot change what this server has said."""
    kept = Transcripts()
    kept.keep("audio-1", "It is not.", OWNER)
    own = {"data": "AAAA", "expires_at": 1, "transcript": "Yes."}
    for audio, text in (({"id": "audio-2", **own}, "Yes."), (own, "Yes."), ({"id": "audio-1", **own}, "It is not.")):
        message = {"role": "assistant", "content": None, "audio": audio}
        assert kept.fill_in([message], OWNER) == [{"role": "assistant", "content": text}]


def test_transcripts_expire_and_their_bytes_are_limited() -> None:
    kept, now = Transcripts(), time.monotonic()
    kept.keep("audio-1", "a", OWNER)
    with mock.patch("time.time", lambda: 1e12):  # A clock that is set.
        assert kept.fill_in(naming("audio-1"), OWNER)
    with (
        mock.patch("time.monotonic", lambda: now + LIFETIME_S + 1),
        pytest.raises(VLLMValidationError, match="expired"),
    ):
        kept.fill_in(naming("audio-1"), OWNER)
    with mock.patch.object(chat_media, "MAX_TRANSCRIPT_BYTES", 10_000):
        kept.keep("audio-2", "b" * 4000, OWNER)
        kept.keep("audio-3", "c" * 8000, OWNER)
        kept.fill_in(naming("audio-3"), OWNER)
        for audio_id in ("audio-1", "audio-2"):
            with pytest.raises(VLLMValidationError):
                kept.fill_in(naming(audio_id), OWNER)
        kept.keep("audio-4", "d" * 20_000, OWNER)  # More than is kept.
        kept.keep("audio-5", "e", OWNER)
        kept.fill_in(naming("audio-5"), OWNER)


def test_the_transcripts_of_one_key_do_not_remove_those_of_another() -> None:
    kept = Transcripts()
    with mock.patch.object(chat_media, "MAX_TRANSCRIPT_BYTES", 10_000):
        kept.keep("audio-1", "x" * 10, b"one")
        for number in range(5):
            kept.keep(f"audio-other-{number}", "x" * 8000, b"other")
    kept.fill_in(naming("audio-1"), b"one")
    kept.fill_in(naming("audio-other-4"), b"other")
    with pytest.raises(VLLMValidationError):
        kept.fill_in(naming("audio-other-3"), b"other")


def test_an_audio_belongs_to_the_key_that_it_was_made_for() -> None:
    kept = Transcripts()
    kept.keep("audio-1", "It is not.", b"one")
    for owner in (b"other", b""):
        with pytest.raises(VLLMValidationError, match="there is no audio 'audio-1'"):
            kept.fill_in(naming("audio-1"), owner)
    assert kept.fill_in(naming("audio-1"), b"one")[1]["content"] == "It is not."
