# SPDX-License-Identifier: Apache-2.0
"""Transcripts of earlier speech, and how long they are kept."""

import time
from unittest import mock

import pytest
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai import chat_media
from vllm_omni.entrypoints.openai.chat_media import LIFETIME_S, Transcripts


def naming(audio_id: object, **fields: object) -> list[dict]:
    return [{"role": "user", "content": "a"}, {"role": "assistant", "audio": {"id": audio_id}, **fields}]


def test_an_audio_id_is_replaced_by_its_text() -> None:
    kept = Transcripts()
    expires_at = kept.keep("audio-1", "It is not.")
    assert time.time() + LIFETIME_S - 60 < expires_at < time.time() + LIFETIME_S + 60
    assert kept.fill_in(naming("audio-1"))[1] == {"role": "assistant", "content": "It is not."}
    # A message with its text needs no audio.
    assert kept.fill_in(naming("audio-2", content="Yes."))[1]["content"] == "Yes."


@pytest.mark.parametrize("audio_id", ["audio-2", 7, None, ["audio-1"]])
def test_an_unknown_name_is_refused(audio_id: object) -> None:
    kept = Transcripts()
    kept.keep("audio-1", "It is not.")
    with pytest.raises(VLLMValidationError, match="send its transcript"):
        kept.fill_in(naming(audio_id))


def test_transcripts_expire_and_their_number_is_limited() -> None:
    kept, now = Transcripts(), time.time()
    kept.keep("audio-1", "a")
    with mock.patch("time.time", lambda: now + LIFETIME_S + 1), pytest.raises(VLLMValidationError, match="expired"):
        kept.fill_in(naming("audio-1"))
    with mock.patch.object(chat_media, "MAX_TRANSCRIPTS", 2):
        kept.keep("audio-2", "b")
        kept.keep("audio-3", "c")
    kept.fill_in(naming("audio-3"))
    with pytest.raises(VLLMValidationError):
        kept.fill_in(naming("audio-1"))
