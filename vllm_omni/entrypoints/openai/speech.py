# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/speech and GET /v1/audio/voices, as OpenAI has the former, for any pipeline that gives sound.

A model that speaks what it writes is forced to write the text (`forced_text.py`); any other gets it as its prompt. The
answer is a stream of the file's bytes or of server-sent events, or the whole file.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMValidationError
from vllm.tracing import extract_trace_headers

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.entrypoints.openai.audio_formats import (
    AUDIO_FORMATS,
    DEFAULT_SAMPLE_RATE,
    AudioEncoder,
    BrokenAudioError,
    count_channels,
    first_clip,
)
from vllm_omni.entrypoints.openai.chat_media import finish_reason_of
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.forced_text import ForcedTextBuilder
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError, to_http_error
from vllm_omni.entrypoints.openai.media_messages import to_base64
from vllm_omni.entrypoints.openai.media_stage import begun, check_model, new_id, served_names
from vllm_omni.entrypoints.openai.speech_protocol import (
    SpeechDelta,
    SpeechDone,
    SpeechRequest,
    SpeechUsage,
    VoiceId,
    VoiceList,
)
from vllm_omni.entrypoints.openai.stage_params import read_stage_params
from vllm_omni.entrypoints.request_builder import StageSamplingParams
from vllm_omni.errors import OmniError
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent
from vllm_omni.inputs import OmniPrompt

logger = logging.getLogger("vllm.omni.server")

router = APIRouter()

SAMPLE_RATE_HEADER, CHANNELS_HEADER = "X-Sample-Rate", "X-Channels"
"""Of the file: samples per second of each channel, and channels; pcm says neither itself."""
FINISH_REASON_HEADER = "X-Finish-Reason"
"""Of a whole file: `length` where the model may speak no longer, so that the end of the text is missing."""

_ERRORS = (
    HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT,
)  # fmt: skip
_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {
        "description": "The file: its bytes or server-sent events while it is made, or whole with stream: false.",
        "headers": {
            SAMPLE_RATE_HEADER: {"schema": {"type": "integer"}, "description": "Samples per second of each channel."},
            CHANNELS_HEADER: {"schema": {"type": "integer"}, "description": "1, or 2 of a model that makes stereo."},
            FINISH_REASON_HEADER: {"schema": {"type": "string"}, "description": "With stream: false; stop or length."},
        },
        "content": {**dict.fromkeys(AUDIO_FORMATS.values(), _BINARY), "text/event-stream": {}},
    },
    **{status.value: {"model": ErrorResponse} for status in _ERRORS},
}


class ServingSpeech:
    """Makes speech with one pipeline."""

    def __init__(
        self,
        client: OmniEngineClient,
        stage: OmniStageConfig,
        dictation: ForcedTextBuilder | None,
        model_names: Sequence[str],
        keep_alive_s: float,
    ) -> None:
        """
        Args:
            stage: The final stage that makes the sound.
            dictation: How the pipeline is told what to say; None where its prompt is what is to be heard.
            model_names: Those that the pipeline is served under.
            keep_alive_s: A silent stream of events gets a comment after so many seconds; 0: none.
        """
        self._client = client
        self._stage = stage
        self._dictation = dictation
        self._model_names = model_names
        self._keep_alive_s = keep_alive_s

    @classmethod
    def find(cls, state: State, client: OmniEngineClient, args: Namespace) -> ServingSpeech | None:
        """None where the pipeline makes no sound."""
        stages = [stage for stage in client.config.stage_args if stage.final_output]
        stage = next((stage for stage in stages if stage.final_output_type == "audio"), None)
        if stage is None:
            return None
        dictation = None
        if client.stage is not None and client.stage in stages and client.stage.final_output_type == "text":
            tokenizer = client.renderer.get_tokenizer()
            dictation = ForcedTextBuilder(state.online_renderer, tokenizer, client.model_config.max_model_len)
        return cls(client, stage, dictation, served_names(state), float(args.sse_keep_alive_interval))

    async def create(self, request: SpeechRequest, raw_request: Request) -> Response:
        """
        Raises:
            VLLMClientError, OmniError: The request is wrong; it failed.
        """
        check_model(request.model, self._model_names)
        prompt, params = await self._read(request)
        file = _SoundFile(self._stage, request)
        events = self._client.run(
            prompt,
            params,
            new_id("speech", raw_request),
            stream=file.is_streamed,
            keep_outputs=False,  # What was streamed is not read again.
            trace_headers=extract_trace_headers(raw_request.headers),
        )
        if not request.stream:
            return await _whole(file, events)
        parts = await begun(file.parts(events))
        if request.stream_format == "sse":
            lines = with_sse_keep_alive(self._sse_lines(parts), self._keep_alive_s)
            return _ClosingResponse(lines, "text/event-stream", file.headers)
        return _ClosingResponse(_only_bytes(parts), file.media_type, file.headers)

    async def _read(self, request: SpeechRequest) -> tuple[OmniPrompt, list[StageSamplingParams]]:
        """What the pipeline is told."""
        voice = request.voice.id if isinstance(request.voice, VoiceId) else request.voice
        speaker = self._client.voices.read(voice, "voice")
        params: list[StageSamplingParams] = [*read_stage_params(request.sampling_params_list, self._client.config)]
        prompt = OmniPrompt(modalities=["audio"], **speaker)  # type: ignore[typeddict-item]
        if self._dictation is None:
            prompt["prompt"] = request.input
            return prompt, params
        assert self._client.stage is not None
        writer = self._client.config.stage_args.index(self._client.stage)
        if params[writer] is not None:
            raise VLLMValidationError(
                f"stage {self._client.stage.name!r} writes what it is told; give it null",
                parameter=f"sampling_params_list[{writer}]",
            )
        dictated = await self._dictation.prepare(request.input, request.instructions)
        prompt["engine_input"] = dictated.engine_input
        params[writer] = dictated.params
        return prompt, params

    async def _sse_lines(self, parts: AsyncGenerator[bytes | CompletedEvent, None]) -> AsyncGenerator[str, None]:
        """Server-sent events; an error is the last of them."""
        try:
            async with aclosing(parts):
                async for part in parts:
                    if isinstance(part, CompletedEvent):
                        done = SpeechDone(usage=self._usage(part), finish_reason=finish_reason_of(part.outputs[0]))
                        yield _line(done.model_dump_json())
                    elif part:
                        yield _line(SpeechDelta(audio=to_base64(part)).model_dump_json())
        except (OmniError, OmniHTTPError) as error:
            error = to_http_error(error) if isinstance(error, OmniError) else error
            yield f"event: error\n{_line(create_error_response(error).model_dump_json())}"

    def _usage(self, event: CompletedEvent) -> SpeechUsage:
        writer = None if self._client.stage is None else self._client.stage.stage_id
        read = written = 0
        for stage in event.outputs[0].stage_metrics:
            if stage.stage_id == writer:
                read = stage.num_input_tokens + stage.num_output_tokens
            elif stage.stage_id != self._stage.stage_id:
                written += stage.num_output_tokens
        return SpeechUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)


class _SoundFile:
    """The file of one request, encoded while its sound is made.

    Attributes:
        is_streamed: The file is sent while the sound comes in pieces. That of a diffusion stage comes as a whole.
    """

    def __init__(self, stage: OmniStageConfig, request: SpeechRequest) -> None:
        """
        Args:
            stage: The final stage that makes the sound.
        """
        self.is_streamed = request.stream and stage.kind != "DiT"
        self._stage = stage
        self._request = request
        self._encoder: AudioEncoder | None = None

    @property
    def media_type(self) -> str:
        return AUDIO_FORMATS[self._request.response_format]

    @property
    def headers(self) -> dict[str, str]:
        """What the response says of the file; known when its first bytes are."""
        assert self._encoder is not None
        return {
            SAMPLE_RATE_HEADER: str(self._encoder.sample_rate),
            CHANNELS_HEADER: str(self._encoder.num_channels),
        }

    async def parts(self, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[bytes | CompletedEvent, None]:
        """The file's bytes as they are made, and at last the event that says that it is complete.

        Raises:
            OmniError, OmniHTTPError: It failed.
        """
        async with aclosing(events):
            async for event in events:
                samples, rate = self._samples(event)
                if samples.size and (data := await self._encode(samples, rate)):
                    yield data
                if isinstance(event, CompletedEvent):
                    if self._encoder is None:
                        raise OmniHTTPError("the model made no sound of this input", HTTPStatus.INTERNAL_SERVER_ERROR)
                    yield await self._encoder.finish_async()
                    yield event

    def _samples(self, event: OmniEvent) -> tuple[np.ndarray, int]:
        """What an event adds to the sound, float32 `[n]` or `[channels, n]`, and its sample rate."""
        tensors: Mapping[str, torch.Tensor] = {}
        rate = self._stage.sample_rate
        if isinstance(event, ARSegmentEvent) and event.stage_id == self._stage.stage_id:
            tensors = event.multimodal_output
        elif isinstance(event, CompletedEvent) and self._encoder is None:  # No piece came before: it has all of it.
            (output,) = event.outputs
            tensors, rate = output.multimodal_output, output.sample_rate
        return first_clip(tensors.get("audio", torch.empty(0))), rate or DEFAULT_SAMPLE_RATE

    async def _encode(self, samples: np.ndarray, rate: int) -> bytes:
        try:
            if self._encoder is None:
                self._encoder = AudioEncoder(
                    self._request.response_format,
                    rate,
                    self._request.speed,
                    num_channels=count_channels(samples),
                    is_whole=not self.is_streamed,
                )
            return await self._encoder.encode_async(samples)
        except BrokenAudioError as error:
            logger.error("a stage made broken audio: %s", error)
            raise OmniHTTPError("the model made broken audio", HTTPStatus.INTERNAL_SERVER_ERROR) from error


class _ClosingResponse(StreamingResponse):
    """Ends what it streams when it ends itself, for whatever reason: the request is aborted at once."""

    def __init__(self, parts: AsyncGenerator[Any, None], media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(parts, headers=headers, media_type=media_type)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts):
            await super().__call__(scope, receive, send)


async def _whole(file: _SoundFile, events: AsyncGenerator[OmniEvent, None]) -> Response:
    """
    Raises:
        OmniError, OmniHTTPError: It failed.
    """
    data, headers = [], {}
    async with aclosing(file.parts(events)) as parts:
        async for part in parts:
            if isinstance(part, CompletedEvent):
                headers = {**file.headers, FINISH_REASON_HEADER: finish_reason_of(part.outputs[0])}
            else:
                data.append(part)
    return Response(b"".join(data), headers=headers, media_type=file.media_type)


async def _only_bytes(parts: AsyncGenerator[bytes | CompletedEvent, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, bytes) and part:
                yield part


def _line(data: str) -> str:
    return f"data: {data}\n\n"


@router.post("/v1/audio/speech", dependencies=[Depends(validate_json_request)], responses=RESPONSES)
@with_cancellation
@load_aware_call
async def create_speech(request: SpeechRequest, raw_request: Request) -> Response:
    """The speech of a text: streamed while it is made, or as a whole file."""
    state = raw_request.app.state
    if state.omni_speech is None:
        outputs = ", ".join(state.engine_client.config.output_types)
        raise VLLMValidationError(f"this model cannot speak; it outputs {outputs}", parameter="model")
    return await state.omni_speech.create(request, raw_request)


@router.get("/v1/audio/voices")
async def list_voices(raw_request: Request) -> VoiceList:
    """The voices that a request can choose, and further names for them."""
    voices = raw_request.app.state.engine_client.voices
    return VoiceList(voices=voices.names, voice_map=voices.map)


def attach_router(app: FastAPI) -> None:
    app.include_router(router)


def init_state(state: State, client: OmniEngineClient, args: Namespace) -> None:
    state.omni_speech = ServingSpeech.find(state, client, args)
