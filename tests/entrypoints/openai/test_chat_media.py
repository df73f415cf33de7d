# SPDX-License-Identifier: Apache-2.0
"""Transcripts of earlier speech, and how long they are kept; streams whose client is slow."""

import asyncio
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai import chat_media
from vllm_omni.entrypoints.openai.chat_media import LIFETIME_S, MAX_UNSENT_BYTES, MediaStream, Transcripts
from vllm_omni.entrypoints.openai.request_context import RequestOptions
from vllm_omni.events import ARSegmentEvent


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


class Speech:
    """A streamed answer of 100 pieces of a second of speech.

    Attributes:
        num_made: How many pieces were taken from the pipeline.
        is_closed: Whether its request has ended.
    """

    def __init__(self) -> None:
        self.num_made, self.is_closed = 0, False
        config: Any = SimpleNamespace(stages={1: SimpleNamespace(sample_rate=24_000)})
        options = RequestOptions(modalities=("text", "audio"), audio_format="pcm16")
        media = MediaStream(self._pieces(), "r", "model", options, config, None, Transcripts())
        self.lines = media.lines(self._silent(media.text()))

    async def _pieces(self) -> AsyncGenerator[ARSegmentEvent, None]:
        try:
            for self.num_made in range(1, 101):
                yield ARSegmentEvent(
                    request_id="r", sequence=0, ts=0.0, stage_id=1, final_output_type="audio",
                    multimodal_output={"audio": torch.zeros(24_000)},
                )  # fmt: skip
        finally:
            self.is_closed = True

    async def _silent(self, text: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        async for _ in text:
            yield ""


def test_a_stream_is_made_only_as_far_as_its_client_reads() -> None:
    async def main() -> None:
        speech = Speech()
        first = await anext(speech.lines)
        num_made = 0
        while num_made != speech.num_made:  # until no more is made
            num_made = speech.num_made
            for _ in range(100):
                await asyncio.sleep(0)
        assert num_made <= 3 + MAX_UNSENT_BYTES // len(first) and not speech.is_closed
        assert len([line async for line in speech.lines]) == 99
        assert speech.num_made == 100 and speech.is_closed

    asyncio.run(main())


def test_a_stream_whose_client_has_gone_is_closed() -> None:
    async def main() -> None:
        speech = Speech()
        await anext(speech.lines)
        await speech.lines.aclose()
        assert speech.is_closed

    asyncio.run(main())
