# SPDX-License-Identifier: Apache-2.0
"""Transcripts of earlier speech, the audio of streamed answers, and streams whose client is slow."""

import asyncio
import base64
import io
import json
import time
import wave
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput

from tests.entrypoints.openai.audio_stage import AUDIO_STAGE, RATE
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.entrypoints.openai import chat_media
from vllm_omni.entrypoints.openai.chat_media import LIFETIME_S, MAX_UNSENT_BYTES, MediaStream, Transcripts
from vllm_omni.entrypoints.openai.request_context import RequestContext, RequestOptions
from vllm_omni.events import ARSegmentEvent, CompletedEvent
from vllm_omni.outputs import OmniRequestOutput, StageOutput

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
    kept, now = Transcripts(), time.time()
    kept.keep("audio-1", "a", OWNER)
    with mock.patch("time.time", lambda: now + LIFETIME_S + 1), pytest.raises(VLLMValidationError, match="expired"):
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
        media = MediaStream(self._pieces(), "r", "model", RequestContext(options=options), config, Transcripts())
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


def stream_audio(*pieces: torch.Tensor, format: str = "wav") -> list[dict[str, Any]]:
    """The chunks of a streamed answer whose final stage yields these pieces."""

    async def events() -> AsyncGenerator[Any, None]:
        nothing = CompletionOutput(0, "", [], None, None, finish_reason="stop")
        at = {"request_id": "r", "sequence": 0, "ts": 0.0}
        yield RequestOutput("r", None, [1], None, [nothing], finished=True)
        for piece in pieces:
            yield ARSegmentEvent(**at, stage_id=0, final_output_type="audio", multimodal_output={"audio": piece})
        output = StageOutput(request_id="r", stage_id=0)
        yield CompletedEvent(**at, outputs=[OmniRequestOutput("r", output, "audio", [])])

    async def main() -> list[dict[str, Any]]:
        options = RequestOptions(modalities=("audio",), shows_text=False, audio_format=format)
        config = parse_pipeline_config({"stage_args": [AUDIO_STAGE]}, "test")
        media = MediaStream(events(), "r", "m", RequestContext(options=options), config, Transcripts())

        async def no_lines() -> AsyncGenerator[str, None]:
            async for _ in media.text():
                for nothing in ():
                    yield nothing

        return [json.loads(bytes(line)[6:]) async for line in media.lines(no_lines())]

    return asyncio.run(main())


@pytest.mark.parametrize("shape", [(), (2,), (1, 2)])
def test_streamed_audio_has_all_its_channels(shape: tuple[int, ...]) -> None:
    """Of a speech model, of two channels, and of the clips of a diffusion stage."""
    sound = torch.linspace(-0.5, 0.5, 600).reshape(*shape, -1)
    chunks = stream_audio(sound[..., :200], sound[..., :0], sound[..., 200:])
    audio = [chunk["choices"][0]["delta"].get("audio", {}) for chunk in chunks]
    data = b"".join(base64.b64decode(part.get("data", "")) for part in audio)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels()) == (RATE, 2 if shape else 1)
        samples = np.frombuffer(data[44:], "<i2").reshape(-1, file.getnchannels()).T / 32768
    np.testing.assert_allclose(samples, sound.reshape(samples.shape), atol=1 / 32768)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
