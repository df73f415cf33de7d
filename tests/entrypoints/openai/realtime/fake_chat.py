# SPDX-License-Identifier: Apache-2.0
"""Sessions without a pipeline: a chat handler that answers at once, and an ASR stage that measures levels."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from fastapi import FastAPI
from vllm.exceptions import VLLMValidationError

from tests.entrypoints.openai.small_apps import make_app
from vllm_omni.entrypoints.openai.media_input import MIN_AUDIO_SECONDS
from vllm_omni.entrypoints.openai.media_request import MediaFetcher
from vllm_omni.entrypoints.openai.realtime.serving import ServingRealtime, router
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni.entrypoints.openai.voices import Voices

MODEL = "fake"
MAX_PARTS = {"audio": 999, "image": 2}
TONE = np.full(2400, 1000 / 32768, np.float32)
"""100 ms of speech."""


class FakeASRStage:
    """Writes the level of a constant sound; nothing for silence and quiet noises."""

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def check(self, settings: Mapping[str, Any]) -> None: ...

    async def transcript(self, url: str, parameter: str, settings: Mapping[str, Any]) -> str:
        samples, _ = RequestContext.current().kept_sounds[url]()
        level = round(float(np.median(samples)), 1) if len(samples) else 0.0
        return f"It is {level}." if level else ""


class FakeChat:
    """A chat handler, that reads the media of its messages.

    Attributes:
        requests: Those so far.
        heard: Of each request the samples of its sounds, and its texts.
        answer: Makes the deltas of an answer of its messages. By default they repeat the last text.
        error: What the next answer raises, once.
        may_end: Whether answers go on after their first deltas.
        num_begun, num_ended, num_complete: Answers of which the first delta was read; that have ended, aborted or not;
            whose last delta was made.
        media: Reads images; set with the application.
    """

    media: MediaFetcher

    def __init__(self, *, hears: bool = False) -> None:
        stages = [SimpleNamespace(final_output=True, final_output_type="audio", sample_rate=24_000)]
        config = SimpleNamespace(
            output_types=["text", "audio"], stage_args=stages, accepting_stage=lambda *types: object()
        )
        processor = SimpleNamespace(info=SimpleNamespace(allowed_mm_limits=MAX_PARTS))
        self.client = SimpleNamespace(
            config=config,
            voices=Voices(["ann"], {}),
            has_renderer=True,
            stage=SimpleNamespace(transcription_prompt="Transcribe."),
            renderer=SimpleNamespace(mm_processor=processor, mm_processor_cache=None),
            check_admission=lambda: None,
            has_idle_room=lambda: True,
            model_config=SimpleNamespace(max_model_len=1024),
            default_sampling_params={},
        )
        self.asr_stage = None if hears else FakeASRStage()
        self.requests: list[Any] = []
        self.heard: list[list[Any]] = []
        self.answer: Callable[[list[Any]], Iterable[ChatDelta]] = repeat
        self.error: Exception | None = None
        self.may_end = True
        self.num_begun = self.num_ended = self.num_complete = 0

    async def create_deltas(self, request: Any) -> AsyncGenerator[ChatDelta, None]:
        self.requests.append(request)
        parts = [part for message in request.messages for part in _parts_of(message)]
        await self.media.images([part["image_url"]["url"] for part in parts if part["type"] == "image_url"], "messages")
        kept = RequestContext.current().kept_sounds
        sounds = [kept[part["audio_url"]["url"]]() for part in parts if part["type"] == "audio_url"]
        if any(len(samples) < MIN_AUDIO_SECONDS * rate for samples, rate in sounds):
            raise VLLMValidationError("a sound is too short")
        self.heard.append(
            [len(samples) for samples, _ in sounds] + [part["text"] for part in parts if part["type"] == "text"]
        )
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self._stream(self.answer(request.messages))

    async def _stream(self, deltas: Iterable[ChatDelta]) -> AsyncGenerator[ChatDelta, None]:
        try:
            for i, delta in enumerate(deltas):
                yield delta
                self.num_begun += not i
                while not self.may_end:
                    await asyncio.sleep(0.01)
            usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
            self.num_complete += 1
            yield ChatDelta(finish_reason="stop", usage=usage)
        finally:
            self.num_ended += 1


def _parts_of(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def repeat(messages: list[Any]) -> list[ChatDelta]:
    content = messages[-1].get("content") if messages else None
    text = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content or ())
    return [ChatDelta(text=f"I heard: {text}"), ChatDelta(speech=TONE), ChatDelta(speech=TONE)]


def session_app(chat: FakeChat, *, model: str = MODEL, **flags: Any) -> FastAPI:
    """The application of its sessions."""
    app = make_app(**{"allowed_local_media_path": "", "allowed_media_domains": None, **flags})
    app.include_router(router)
    app.state.openai_serving_models = SimpleNamespace(base_model_paths=[SimpleNamespace(name=model)])
    app.state.omni_realtime = ServingRealtime(chat, app.state, app.state.args, app.state.omni_sessions)  # type: ignore[arg-type]
    chat.media = MediaFetcher(chat.client, app.state.args)  # type: ignore[arg-type]
    return app
