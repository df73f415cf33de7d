# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/speech, as in OpenAI's API, and GET /v1/audio/voices, for any pipeline that makes audio.

A model that speaks the text it writes is forced to write the input (`forced_text.py`); any other gets it as its prompt.
The answer is a stream of the file's bytes or of server-sent events, or the whole file.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMValidationError
from vllm.tracing import extract_trace_headers

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.entrypoints.openai.audio_formats import (
    AUDIO_FORMATS,
    DEFAULT_SAMPLE_RATE,
    MAX_SPEED,
    MIN_SPEED,
    AudioEncoder,
    BrokenAudioError,
    count_channels,
    first_clip,
)
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.forced_text import ForcedTextBuilder
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError, describe_errors, to_http_error
from vllm_omni.entrypoints.openai.media_output import finish_reason_of
from vllm_omni.entrypoints.openai.media_stage import check_model, get_handler, new_id, served_names
from vllm_omni.entrypoints.openai.request_context import started
from vllm_omni.entrypoints.openai.stage_params import read_stage_params
from vllm_omni.entrypoints.request_builder import StageSamplingParams
from vllm_omni.errors import OmniError
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent
from vllm_omni.inputs import OmniPrompt
from vllm_omni.outputs import OmniRequestOutput

logger = logging.getLogger("vllm.omni.server")

router = APIRouter()

SAMPLE_RATE_HEADER, CHANNELS_HEADER = "X-Sample-Rate", "X-Channels"
"""Of the file: samples per second of each channel, and channels. pcm has no header with them."""
FINISH_REASON_HEADER = "X-Finish-Reason"
"""Of a whole file: `length` if the speech was cut at the model's limit, so that the end of the text is missing."""

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
    **describe_errors(HTTPStatus.INTERNAL_SERVER_ERROR),
}


MAX_INPUT_CHARS = 4096

SpeechFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class VoiceId(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = Field(description="Its name.", examples=["ethan"])


class SpeechRequest(BaseModel):
    """A text to be spoken."""

    model_config = ConfigDict(extra="forbid")

    input: str = Field(
        min_length=1,
        max_length=MAX_INPUT_CHARS,
        description="The text to speak; for a model of sounds or music, its prompt.",
        examples=["Hello. How are you?"],
    )
    model: str | None = Field(None, description="A name of GET /v1/models; default: the model that is served.")
    voice: str | VoiceId | None = Field(
        None, description="One of GET /v1/audio/voices; default, or 'default': the first of them.", examples=["alloy"]
    )
    instructions: str | None = Field(
        None,
        max_length=MAX_INPUT_CHARS,
        description="How to speak it: the system message of models that write what they speak. Other models do not "
        "use it.",
        examples=["Speak slowly and kindly."],
    )
    response_format: SpeechFormat = Field(
        "mp3",
        description="The file's format. pcm: 16-bit little-endian samples without a header, channels interleaved.",
    )
    speed: float = Field(1.0, ge=MIN_SPEED, le=MAX_SPEED, description="Factor of the speed, at the same pitch.")
    stream_format: Literal["audio", "sse"] = Field(
        "audio", description="How the speech is sent while it is made: the bytes of the file, or server-sent events."
    )
    stream: bool = Field(True, description="false: send the file when it is complete; its headers have its length.")
    sampling_params_list: list[dict[str, Any] | None] | None = Field(
        None,
        description="Sampling parameters of each stage, in stage order; null for a stage's defaults, and for the stage "
        "that writes the text.",
        examples=[[None, {"temperature": 0.7}, None]],
    )

    @field_validator("input")
    @classmethod
    def _is_not_blank(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the text is blank")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> SpeechRequest:
        if not self.stream and self.stream_format == "sse":
            raise VLLMValidationError("stream_format 'sse' is a stream; leave stream out", parameter="stream")
        return self


class VoiceList(BaseModel):
    voices: list[str] = Field(description="The model's voices, the default one first; empty if there is no choice.")
    voice_map: dict[str, str] = Field(description="Further names, each with the voice that it means.")


class ServingSpeech:
    """The handler of the endpoint."""

    def __init__(self, state: State, client: OmniEngineClient, stage: OmniStageConfig, args: Namespace) -> None:
        """
        Args:
            stage: The final stage that makes the audio.
        """
        self._client = client
        self._stage = stage
        self._model_names = served_names(state)
        self._keep_alive_s = float(args.sse_keep_alive_interval)
        self._forced_text: ForcedTextBuilder | None = None  # None: the input is the pipeline's prompt.
        if client.stage is not None and client.stage.final_output and client.stage.final_output_type == "text":
            tokenizer = client.renderer.get_tokenizer()
            max_model_len = client.model_config.max_model_len
            self._forced_text = ForcedTextBuilder(state.online_renderer, tokenizer, max_model_len)

    async def create(self, request: SpeechRequest, raw_request: Request) -> Response:
        """Raises `VLLMClientError` if the request is wrong, `OmniError` if it failed."""
        check_model(request.model, self._model_names)
        prompt, params = await self._read(request)
        file = _AudioFile(self._stage, request)
        events = self._client.run(
            prompt,
            params,
            new_id("speech", raw_request),
            stream=file.is_streamed,
            keep_outputs=False,  # Streamed outputs are not read again.
            trace_headers=extract_trace_headers(raw_request.headers),
        )
        if not request.stream:
            return await _whole(file, events)
        parts = await started(file.parts(events))
        if request.stream_format == "sse":
            lines = with_sse_keep_alive(self._sse_lines(file, parts), self._keep_alive_s)
            return _ClosingResponse(lines, "text/event-stream", file.headers)
        return _ClosingResponse(parts, file.media_type, file.headers)

    async def _read(self, request: SpeechRequest) -> tuple[OmniPrompt, list[StageSamplingParams]]:
        """The prompt and the sampling parameters of all stages."""
        voice = request.voice.id if isinstance(request.voice, VoiceId) else request.voice
        speaker = self._client.voices.read(voice, "voice")
        params: list[StageSamplingParams] = [*read_stage_params(request.sampling_params_list, self._client.config)]
        prompt = OmniPrompt(modalities=["audio"], **speaker)  # type: ignore[typeddict-item]
        if self._forced_text is None:
            prompt["prompt"] = request.input
            return prompt, params
        assert self._client.stage is not None
        writer = self._client.config.stage_args.index(self._client.stage)
        if params[writer] is not None:
            raise VLLMValidationError(
                f"stage {self._client.stage.name!r} writes the input and does not sample; give it null",
                parameter=f"sampling_params_list[{writer}]",
            )
        prompt["engine_input"], params[writer] = await self._forced_text.prepare(request.input, request.instructions)
        return prompt, params

    async def _sse_lines(self, file: _AudioFile, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[str, None]:
        """OpenAI's server-sent events, with `finish_reason`; an error is the last of them."""
        try:
            async with aclosing(parts):
                async for part in parts:
                    yield _line({"type": "speech.audio.delta", "audio": part})
            reason, usage = finish_reason_of(file.output), self._usage(file.output)
            yield _line({"type": "speech.audio.done", "finish_reason": reason, "usage": usage})
        except (OmniError, OmniHTTPError) as error:
            error = to_http_error(error) if isinstance(error, OmniError) else error
            yield "event: error\n" + _line(create_error_response(error).model_dump())

    def _usage(self, output: OmniRequestOutput) -> dict[str, int]:
        """Input: tokens of the prompt and the text. Output: tokens of the speech."""
        writer = None if self._client.stage is None else self._client.stage.stage_id
        read = written = 0
        for stage in output.stage_metrics:
            if stage.stage_id == writer:
                read = stage.num_input_tokens + stage.num_output_tokens
            elif stage.stage_id != self._stage.stage_id:
                written += stage.num_output_tokens
        return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}


class _AudioFile:
    """The file of one request, encoded while the final stage makes its audio.

    Attributes:
        is_streamed: The file is sent while it is encoded. Audio of a diffusion stage comes as a whole.
        output: The pipeline's, after the last of the `parts`.
    """

    output: OmniRequestOutput

    def __init__(self, stage: OmniStageConfig, request: SpeechRequest) -> None:
        self.is_streamed = request.stream and stage.kind != "DiT"
        self._stage = stage
        self._request = request
        self._encoder: AudioEncoder | None = None

    @property
    def media_type(self) -> str:
        return AUDIO_FORMATS[self._request.response_format]

    @property
    def headers(self) -> dict[str, str]:
        """Headers that describe the file; known with its first bytes."""
        assert self._encoder is not None
        return {
            SAMPLE_RATE_HEADER: str(self._encoder.sample_rate),
            CHANNELS_HEADER: str(self._encoder.num_channels),
        }

    async def parts(self, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[bytes, None]:
        """The file's bytes as they are encoded; no part is empty.

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
                        raise OmniHTTPError("the model made no audio for this input", HTTPStatus.INTERNAL_SERVER_ERROR)
                    (self.output,) = event.outputs
                    if rest := await self._encoder.finish_async():
                        yield rest

    def _samples(self, event: OmniEvent) -> tuple[np.ndarray, int]:
        """The samples of an event, float32 `[n]` or `[channels, n]`, and their sample rate."""
        tensors: Mapping[str, torch.Tensor] = {}
        rate = self._stage.sample_rate
        if isinstance(event, ARSegmentEvent) and event.stage_id == self._stage.stage_id:
            tensors = event.multimodal_output
        elif isinstance(event, CompletedEvent) and self._encoder is None:  # Nothing was streamed: it has all samples.
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
    """Closes its generator when it ends for any reason, which aborts the request at once."""

    def __init__(self, parts: AsyncGenerator[Any, None], media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(parts, headers=headers, media_type=media_type)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts):
            await super().__call__(scope, receive, send)


async def _whole(file: _AudioFile, events: AsyncGenerator[OmniEvent, None]) -> Response:
    """
    Raises:
        OmniError, OmniHTTPError: It failed.
    """
    async with aclosing(file.parts(events)) as parts:
        data = b"".join([part async for part in parts])
    headers = {**file.headers, FINISH_REASON_HEADER: finish_reason_of(file.output)}
    return Response(data, headers=headers, media_type=file.media_type)


def _line(data: dict[str, Any]) -> str:
    """msgspec writes bytes as base64."""
    return f"data: {msgspec.json.encode(data).decode()}\n\n"


@router.post("/v1/audio/speech", dependencies=[Depends(validate_json_request)], responses=RESPONSES)
@with_cancellation
@load_aware_call
async def create_speech(request: SpeechRequest, raw_request: Request) -> Response:
    """The speech of a text: streamed while it is made, or as a whole file."""
    return await get_handler(raw_request, "audio").create(request, raw_request)


@router.get("/v1/audio/voices")
async def list_voices(raw_request: Request) -> VoiceList:
    """The voices that a request can choose, and further names for them."""
    voices = raw_request.app.state.engine_client.voices
    return VoiceList(voices=voices.names, voice_map=voices.map)
