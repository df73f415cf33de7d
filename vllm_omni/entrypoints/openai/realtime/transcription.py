# SPDX-License-Identifier: Apache-2.0
"""Transcripts of a user's turns, for the client: made beside the responses, which do not need them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress

from openai.types.audio.transcription import UsageDuration

from vllm_omni.entrypoints.openai.realtime.audio import Sound
from vllm_omni.entrypoints.openai.realtime.chat_stream import as_event_error, deltas_of
from vllm_omni.entrypoints.openai.realtime.config import Values, transcription_request
from vllm_omni.entrypoints.openai.realtime.conversation import Item
from vllm_omni.entrypoints.openai.realtime.output_items import SessionContext
from vllm_omni.entrypoints.openai.realtime.protocol import EventError
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni.entrypoints.openai.transcriptions import Transcript, stage_prompt, token_usage
from vllm_omni.errors import PipelineFullError
from vllm_omni.vllm_protocol import UsageInfo

_EVENT = "conversation.item.input_audio_transcription"
_MAX_AT_ONCE = 4  # By the model; further ones wait.


async def write_texts(session: SessionContext, items: Iterable[Item]) -> None:
    """Has the ASR stage write the text of each sound that has none. Run it in a task of its own, as `deltas_of`.

    Raises:
        EventError: It failed.
    """
    sounds = [(sound, item.asr_settings) for item in items for sound in item.sounds.values() if sound.text is None]
    texts = await _transcripts(session, sounds)
    for (sound, _), text in zip(sounds, texts, strict=True):
        sound.text = text


async def _transcripts(session: SessionContext, sounds: Sequence[tuple[Sound, Values]]) -> list[str]:
    """The texts of sounds, each with parameters of the ASR stage. Raises `EventError`."""
    context = RequestContext.start(session.client)
    context.kept_sounds = {sound.address: sound.decoded for sound, _ in sounds}
    stage = session.chat.asr_stage
    assert stage is not None
    try:
        return await asyncio.gather(*(stage.transcript(sound.url, "item.content", given) for sound, given in sounds))
    except Exception as error:
        raise as_event_error(error) from error


class InputTranscriptions:
    """The transcriptions of one session's input."""

    def __init__(self, session: SessionContext, model: str) -> None:
        """
        Args:
            model: Its name in requests.
        """
        self._session, self._model = session, model
        self._speculative: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    def start(self, item: Item, sound: Sound, settings: Values) -> None:
        """Transcribes the sound of an item, in a task.

        Args:
            settings: The session's `audio.input.transcription`.
        """
        self._session.start(self._transcribe(item, sound, settings))

    def speculate(self, sound: Sound, settings: Values) -> None:
        """Begins the transcript of a sound that may be all that the user says. What then needs it finds it, with the
        same samples and parameters, at the ASR stage; the one before is dropped.

        Args:
            settings: Values of the ASR stage's parameters.
        """
        self.drop_speculative()
        self._speculative = self._session.start(self._write_speculative(sound, settings))

    def drop_speculative(self) -> None:
        """Aborts the transcript that `speculate` has begun, unless something else waits for it."""
        if self._speculative is not None:
            self._speculative.cancel()

    async def _write_speculative(self, sound: Sound, settings: Values) -> None:
        with suppress(EventError):  # What needs it fails with the same error, or has a transcript.
            await _transcripts(self._session, [(sound, settings)])

    async def _transcribe(self, item: Item, sound: Sound, settings: Values) -> None:
        where = {"item_id": item.id, "content_index": 0}
        by_model = self._session.chat.asr_stage is None
        usage = token_usage(UsageInfo()) if by_model else UsageDuration(type="duration", seconds=item.seconds)
        transcript = Transcript(usage=usage, deltas=self._deltas(item, sound, settings))
        try:
            async with aclosing(transcript.read()) as texts:
                async for text in texts:
                    await self._session.send(f"{_EVENT}.delta", **where, delta=text)
            item.content[0]["transcript"] = transcript.text
            item.count_texts()
        except (EventError, PipelineFullError) as error:
            await self._session.send(f"{_EVENT}.failed", **where, error=as_event_error(error).as_dict())
            return
        used = {"type": transcript.usage.type, **transcript.usage.model_dump(exclude_none=True)}
        await self._session.send(f"{_EVENT}.completed", **where, transcript=transcript.text, usage=used)

    async def _deltas(self, item: Item, sound: Sound, settings: Values) -> AsyncGenerator[ChatDelta, None]:
        """The text of a sound, by the ASR stage if there is one, or by the model. Raises `EventError`."""
        if self._session.chat.asr_stage is not None:
            await write_texts(self._session, [item])
            yield ChatDelta(text=sound.text or "")
            return
        request = transcription_request(settings, sound.url).as_chat(
            stage_prompt(self._session.chat.client, "transcribe")
        )
        request.model = self._model
        deltas = deltas_of(self._session, request, [sound])
        async with self._slots, aclosing(deltas):
            async for delta in deltas:
                yield delta
