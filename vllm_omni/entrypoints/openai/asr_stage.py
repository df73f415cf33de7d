# SPDX-License-Identifier: Apache-2.0
"""The ASR stage of a pipeline: it transcribes, for the endpoints of transcriptions and for the sounds of a chat whose
model reads text only."""

from __future__ import annotations

import asyncio
import hashlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_endpoint import new_id
from vllm_omni.entrypoints.openai.media_request import MediaFetcher
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni.events import ARSegmentEvent
from vllm_omni.inputs import OmniPrompt

MAX_TRANSCRIPTS = 1024
"""That are kept: a conversation has its earlier sounds in every request."""


TIMESTAMPS = "timestamps"
"""The parameter of a stage that tells when each word is spoken, if it is asked."""
_WORD_TIMES = "word_times"
"""The output of such a stage: start and end, in seconds, of each word of its text."""


@dataclass(frozen=True, kw_only=True)
class TimedDelta(ChatDelta):
    """
    Attributes:
        word_times: The start and the end, in seconds, of each word of the text, which blanks separate; empty: not
            asked for.
    """

    word_times: Sequence[Sequence[float]] = ()


@dataclass
class _Transcript:
    task: asyncio.Task[str]
    num_waiting: int = 0


_Key = tuple[bytes, bytes, tuple[tuple[str, Any], ...]]
"""Of a transcript: the request's owner, the sound's hash, and the settings."""


class ASRStage:
    """
    Attributes:
        parameters: Names of the stage's parameters.
    """

    def __init__(self, client: OmniEngineClient, stage: OmniStageConfig, media: MediaFetcher) -> None:
        """
        Args:
            stage: Accepts audio, and is or leads to a final stage with text.
        """
        self._client = client
        self._stage = stage
        self._media = media
        self._final_stages = client.config.final_stages(["text"], stage.stage_id)
        own = client.llm.builder.function_parameters.get(stage.stage_id)
        self.parameters: Sequence[str] = () if own is None else own.names
        if stage.kind.params == "sampling":
            self.parameters = (*self.parameters, "temperature")
        self._transcripts: OrderedDict[_Key, _Transcript] = OrderedDict()

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Selects the settings of a client that the stage has parameters for.

        Args:
            given: By name; None: not set.
        """
        return {name: value for name, value in given.items() if value is not None and name in self.parameters}

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raises `ValueError` or `TypeError` where the stage refuses a value of a parameter."""
        self._client.llm.builder.read_parameters(self._stage.stage_id, settings, {})

    async def transcribe(
        self, sound: tuple[np.ndarray, float], settings: Mapping[str, Any], request_id: str, **options: Any
    ) -> AsyncGenerator[TimedDelta, None]:
        """The transcript, in deltas of its text.

        Args:
            sound: As `MediaFetcher.sound` returns it.
            settings: Values of the stage's parameters.
            options: Further arguments of `OmniEngineClient.run`.

        Raises:
            OmniError: It failed.
        """
        prompt = OmniPrompt(stage=self._stage.name, modalities=["text"], multi_modal_data={"audio": sound})
        params = [settings or None if stage == self._stage else None for stage in self._client.config.stage_args]
        events = self._client.run(prompt, params, request_id, stream=True, keep_outputs=False, **options)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ARSegmentEvent) and event.stage_id in self._final_stages and event.text:
                    times = event.multimodal_output.get(_WORD_TIMES)
                    yield TimedDelta(text=event.text, word_times=[] if times is None else times.tolist())

    async def transcript(self, url: str, parameter: str, settings: Mapping[str, Any]) -> str:
        """The transcript of a sound of a conversation, empty if it has no words; with the settings and errors of
        `transcribe`. It is made once for all that wait for it, and aborted when the last of them is cancelled.

        A sound at an address is fetched each time, because it may have changed.
        """
        sound = None if url[:5].lower() == "data:" else await self._media.sound(url, parameter)
        digest = await asyncio.to_thread(_digest, url, sound)
        key = (RequestContext.current().owner, digest, tuple(sorted(settings.items())))
        made = self._transcripts.get(key)
        if made is None:
            made = _Transcript(asyncio.create_task(self._fetch_transcript(url, sound, parameter, settings)))
            self._transcripts[key] = made
        self._transcripts.move_to_end(key)
        if len(self._transcripts) > MAX_TRANSCRIPTS:
            self._transcripts.popitem(last=False)
        made.num_waiting += 1
        try:
            return await asyncio.shield(made.task)  # Another request may wait for it.
        except BaseException:
            if made.task.done() or made.num_waiting == 1:
                made.task.cancel()
                if self._transcripts.get(key) is made:
                    del self._transcripts[key]  # It is tried again.
            raise
        finally:
            made.num_waiting -= 1

    async def _fetch_transcript(
        self, url: str, sound: tuple[np.ndarray, float] | None, parameter: str, settings: Mapping[str, Any]
    ) -> str:
        if sound is None:
            sound = await self._media.sound(url, parameter)
        async with aclosing(self.transcribe(sound, settings, new_id("transcription"))) as deltas:
            return "".join([delta.text async for delta in deltas]).strip()

    async def as_text(self, messages: Sequence[Any]) -> list[Any]:
        """Messages with the transcript in the place of each sound.

        Args:
            messages: As `read_messages` returns them.

        Raises as `transcript`.
        """
        sounds = list(_find_sounds(messages))
        texts = await asyncio.gather(*(self.transcript(url, f"messages[{i}].content[{j}]", {}) for i, j, url in sounds))
        made = list(messages)
        for i in {i for i, _, _ in sounds}:
            made[i] = {**messages[i], "content": list(messages[i]["content"])}
        for (i, j, _), text in zip(sounds, texts, strict=True):
            made[i]["content"][j] = {"type": "text", "text": text}
        return made


def _digest(url: str, sound: tuple[np.ndarray, float] | None) -> bytes:
    """The digest of a sound, or of the data URI that contains it."""
    if sound is None:
        return hashlib.sha256(url.encode()).digest()
    samples, sample_rate = sound
    return hashlib.sha256(f"{sample_rate} ".encode() + samples.tobytes()).digest()


def _find_sounds(messages: Sequence[Any]) -> Iterator[tuple[int, int, str]]:
    """Each sound of messages: the index of its message, that of its part, and its URL."""
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if (url := sound_url(part)) is not None:
                yield i, j, url


def sound_url(part: Any) -> str | None:
    """The URL of a sound in a message, whose parts are as `read_messages` returns them; None of any other part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "audio_url":
        return str(part[kind]["url"])
    return f"data:audio/wav;base64,{part[kind]['data']}" if kind == "input_audio" else None


def load_asr_stage(client: OmniEngineClient, args: Namespace) -> ASRStage | None:
    """The pipeline's ASR stage; None if it has none."""
    stage = client.config.accepting_stage("audio", "text")
    return None if stage is None else ASRStage(client, stage, MediaFetcher(client, args))
