# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/speech, as in OpenAI's API, and /v1/audio/speech/batch, for any pipeline that makes audio.

A stage that accepts text speaks it alone. Any other model that speaks the text it writes is forced to write the input
(`forced_text.py`), and a model of speech gets it as its prompt.
The answer is a stream of the file's bytes or of server-sent events, or the whole file; of a batch, all files in JSON.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field
from starlette.datastructures import State
from starlette.requests import HTTPConnection
from vllm.exceptions import VLLMClientError, VLLMValidationError

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.entrypoints.openai.audio_formats import AUDIO_FORMATS
from vllm_omni.entrypoints.openai.custom_voices import CustomVoices
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.forced_text import ForcedTextBuilder
from vllm_omni.entrypoints.openai.http_errors import (
    FORM_ERRORS,
    OmniHTTPError,
    describe_errors,
    error_body,
    to_http_error,
)
from vllm_omni.entrypoints.openai.media_endpoint import MediaEndpoint, get_handler
from vllm_omni.entrypoints.openai.media_output import FINISH_REASON_HEADER, finish_reason_of, to_base64
from vllm_omni.entrypoints.openai.request_context import RequestContext, model_route, started
from vllm_omni.entrypoints.openai.server_args import RequestLimits, flag, limits_from
from vllm_omni.entrypoints.openai.speech_file import SpeechFile
from vllm_omni.entrypoints.openai.speech_request import (
    WITHOUT_EFFECT,
    SpeechBatchRequest,
    SpeechFormat,
    SpeechPromptReader,
    SpeechRequest,
    SpeechSettings,
    check_text,
)
from vllm_omni.entrypoints.openai.sse import MEDIA_TYPE, ClosingResponse, Line, sse_line
from vllm_omni.entrypoints.openai.stage_params import read_stage_params
from vllm_omni.entrypoints.request_builder import StageSamplingParams
from vllm_omni.errors import OmniError
from vllm_omni.events import OmniEvent
from vllm_omni.inputs import OmniPrompt
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.vllm_protocol import ErrorInfo

router = APIRouter()

SAMPLE_RATE_HEADER, CHANNELS_HEADER = "X-Sample-Rate", "X-Channels"
"""Of the file: samples per second of each channel, and channels. pcm has no header with them."""
WARNING_HEADER = "Warning"
"""Names the fields of other servers that the request has and that have no effect here."""

_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {
        "description": "The file: its bytes or server-sent events while it is made, or whole with stream: false.",
        "headers": {
            SAMPLE_RATE_HEADER: {"schema": {"type": "integer"}, "description": "Samples per second of each channel."},
            CHANNELS_HEADER: {"schema": {"type": "integer"}, "description": "1, or 2 of a model that makes stereo."},
            FINISH_REASON_HEADER: {"schema": {"type": "string"}, "description": "With stream: false; stop or length."},
            WARNING_HEADER: {"schema": {"type": "string"}, "description": "Fields that have no effect here, if any."},
        },
        "content": {**dict.fromkeys(AUDIO_FORMATS.values(), _BINARY), MEDIA_TYPE: {}},
    },
    **FORM_ERRORS,
}


class SpeechUsage(BaseModel):
    input_tokens: int = Field(description="Of the prompt and the text.")
    output_tokens: int = Field(description="Of the speech.")
    total_tokens: int


class BatchItem(BaseModel):
    """The result of one text: its file, or an error."""

    index: int = Field(description="Of the text in inputs.")
    audio: str | None = Field(default=None, description="The file, as base64.")
    sample_rate: int | None = Field(default=None, description="Samples per second of each channel.")
    channels: int | None = None
    finish_reason: str | None = Field(
        default=None,
        description="stop, or length: the speech was cut at the model's limit, and the end of the text is missing.",
    )
    usage: SpeechUsage | None = None
    error: ErrorInfo | None = Field(default=None, description="Why there is no file; the other texts have theirs.")


class SpeechBatch(BaseModel):
    """The files of a batch, in the order of its texts."""

    object: Literal["list"] = "list"
    model: str
    response_format: SpeechFormat
    data: list[BatchItem]


@dataclass(frozen=True, kw_only=True)
class VoiceSettings:
    """What all texts of a request, or of a session, share.

    Attributes:
        information: The prompt's `additional_information`.
        params: The sampling parameters of all stages.
        ignored: Names of fields without effect.
    """

    request: SpeechSettings
    information: Mapping[str, Any]
    params: list[StageSamplingParams]
    ignored: Sequence[str]


class ServingSpeech(MediaEndpoint):
    """The handler of both endpoints.

    Attributes:
        custom_voices: The voices that clients have uploaded.
    """

    kind = "speech"

    def __init__(self, state: State, client: OmniEngineClient, stage: OmniStageConfig, args: Namespace) -> None:
        super().__init__(state, client, stage, args)
        self._max_inputs = limits_from(args, RequestLimits).max_speech_inputs
        self.custom_voices = CustomVoices(client, self.media, args)
        self._reader = SpeechPromptReader(client, self.media, self.custom_voices.store)
        self._forced_text: ForcedTextBuilder | None = None  # None: the input is the pipeline's prompt.
        self._speaking_stage = client.config.accepting_stage("text", "audio")
        writer = None if self._speaking_stage is not None else client.stage
        if writer is not None and writer.final_output and writer.final_output_type == "text":
            tokenizer = client.renderer.get_tokenizer()
            max_model_len = client.model_config.max_model_len
            self._forced_text = ForcedTextBuilder(state.online_renderer, tokenizer, max_model_len)

    async def create(self, request: SpeechRequest, raw_request: Request) -> Response:
        """Raises `VLLMClientError` if the request is wrong, `OmniError` if it failed."""
        self.client.check_admission()
        settings = await self.read(request, raw_request)
        file = self.new_file(request, stream=request.stream)
        events = await self.events(request.input, settings, raw_request, stream=file.is_streamed)
        if not request.stream:
            data = await file.whole(events)
            headers = {**_headers(file, settings), FINISH_REASON_HEADER: finish_reason_of(file.output)}
            return Response(data, headers=headers, media_type=file.media_type)
        parts = await started(file.parts(events))
        if request.stream_format == "sse":
            return self.sse(self._lines(file, parts), _headers(file, settings))
        return ClosingResponse(parts, file.media_type, _headers(file, settings))

    async def create_batch(self, request: SpeechBatchRequest, raw_request: Request) -> Response:
        """The answer has the errors of single texts. Raises as `create` if the request is wrong for all of them."""
        if len(request.inputs) > self._max_inputs:
            raise VLLMValidationError(
                f"{len(request.inputs)} texts; a batch takes at most {self._max_inputs} ({flag('max_speech_inputs')})",
                parameter="inputs",
            )
        self.client.check_admission()
        settings = await self.read(request, raw_request)
        speaking = [self._speak(index, text, settings, raw_request) for index, text in enumerate(request.inputs)]
        results = await asyncio.gather(*speaking, return_exceptions=True)
        answer = SpeechBatch(
            model=request.model or self.model_names[0],
            response_format=request.response_format,
            data=[_as_item(index, result) for index, result in enumerate(results)],
        )
        body = await asyncio.to_thread(answer.model_dump_json, exclude_none=True)
        return Response(body, headers=_warning(settings.ignored), media_type="application/json")

    async def _speak(self, index: int, text: str, settings: VoiceSettings, raw_request: Request) -> BatchItem:
        check_text(text, f"inputs[{index}]")
        file = self.new_file(settings.request, stream=False)
        data = await file.whole(await self.events(text, settings, raw_request, stream=False))
        return BatchItem(
            index=index,
            audio=await asyncio.to_thread(to_base64, data),
            sample_rate=file.sample_rate,
            channels=file.num_channels,
            finish_reason=finish_reason_of(file.output),
            usage=self.usage_of(file.output),
        )

    @property
    def reads_pieces(self) -> bool:
        """Whether the model reads a text in pieces, as it is written."""
        processors = self.client.llm.builder.prompt_processors.values()
        return self._speaking_stage is None and [each.reads_pieces for each in processors] == [True]

    @property
    def streams(self) -> bool:
        """Whether speech comes while it is made."""
        return self.stage.kind.streams_output

    def new_file(self, request: SpeechSettings, *, stream: bool, is_joined: bool = False) -> SpeechFile:
        """The file of one text. `is_joined`: see `SpeechFile`."""
        speed = 1.0 if self._reader.sets_speed else request.speed
        return SpeechFile(self.stage, request, speed, stream=stream, is_joined=is_joined)

    async def read(self, request: SpeechSettings, connection: HTTPConnection) -> VoiceSettings:
        """How texts are spoken. Raises as `create`."""
        self.check_model(request.model)
        params: list[StageSamplingParams] = [*read_stage_params(request.sampling_params_list, self.client.config)]
        if self._forced_text is not None and params[self._writer] is not None:
            assert self.client.stage is not None
            raise VLLMValidationError(
                f"stage {self.client.stage.name!r} writes the input and does not sample; give it null",
                parameter=f"sampling_params_list[{self._writer}]",
            )
        information = await self._reader.read(request, RequestContext.of(connection).owner)
        ignored = self._reader.ignored(request)
        return VoiceSettings(request=request, information=information, params=params, ignored=ignored)

    @property
    def _writer(self) -> int:
        """The index of the stage that writes the text."""
        assert self.client.stage is not None
        return self.client.config.stage_args.index(self.client.stage)

    async def events(
        self,
        text: str | AsyncGenerator[str, None],
        settings: VoiceSettings,
        raw_request: HTTPConnection,
        *,
        stream: bool,
    ) -> AsyncGenerator[OmniEvent, None]:
        """The events of one request to the pipeline, see `OmniEngineClient.run`.

        Args:
            text: In pieces of a model that `reads_pieces`.
        """
        prompt = OmniPrompt(modalities=["audio"])
        if settings.information:
            prompt["additional_information"] = dict(settings.information)
        params = list(settings.params)
        if self._speaking_stage is not None:
            prompt["stage"] = self._speaking_stage.name
        if self._forced_text is None:
            prompt["prompt"] = text
        else:
            assert isinstance(text, str)
            prompt["engine_input"], params[self._writer] = await self._forced_text.prepare(
                text, settings.request.instructions
            )
        return self.start(
            prompt,
            params,
            raw_request,
            stream=stream,
            keep_outputs=False,  # Streamed outputs are not read again.
            priority=settings.request.priority,
        )

    async def _lines(self, file: SpeechFile, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[Line, None]:
        """OpenAI's server-sent events, with `finish_reason`."""
        async with aclosing(parts):
            async for part in parts:
                yield sse_line({"type": "speech.audio.delta", "audio": part})
        reason, usage = finish_reason_of(file.output), self.usage_of(file.output)
        yield sse_line({"type": "speech.audio.done", "finish_reason": reason, "usage": usage.model_dump()})

    def usage_of(self, output: OmniRequestOutput) -> SpeechUsage:
        writer = None if self.client.stage is None else self.client.stage.stage_id
        read = written = 0
        for stage in output.stage_metrics:
            if stage.stage_id == writer:
                read = stage.num_input_tokens + stage.num_output_tokens
            elif stage.stage_id != self.stage.stage_id:
                written += stage.num_output_tokens
        return SpeechUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)


def _headers(file: SpeechFile, settings: VoiceSettings) -> dict[str, str]:
    """Headers that describe a file, and what had no effect on it."""
    described = {SAMPLE_RATE_HEADER: str(file.sample_rate), CHANNELS_HEADER: str(file.num_channels)}
    return described | _warning(settings.ignored)


def _warning(ignored: Sequence[str]) -> dict[str, str]:
    """The header about fields without effect, if there are any. 299 is a warning that stays."""
    warnings = [f'299 - "field {name} is ignored: {WITHOUT_EFFECT[name]}"' for name in ignored]
    return {WARNING_HEADER: ", ".join(warnings)} if warnings else {}


def _as_item(index: int, result: BatchItem | BaseException) -> BatchItem:
    if isinstance(result, BatchItem):
        return result
    if not isinstance(result, (OmniError, OmniHTTPError, VLLMClientError)):
        raise result
    error = result if isinstance(result, VLLMClientError) else to_http_error(result)
    return BatchItem(index=index, error=error_body(error).error)


@router.post("/v1/audio/speech", responses=RESPONSES, openapi_extra=SpeechRequest.describe_body())
@model_route
async def create_speech(
    request: Annotated[SpeechRequest, Depends(SpeechRequest.read)], raw_request: Request
) -> Response:
    """The speech of a text: streamed while it is made, or as a whole file."""
    return await get_handler(raw_request, "audio").create(request, raw_request)


@router.post(
    "/v1/audio/speech/batch",
    responses={HTTPStatus.OK.value: {"model": SpeechBatch}, **describe_errors(HTTPStatus.INTERNAL_SERVER_ERROR)},
)
@model_route
async def create_speech_batch(request: SpeechBatchRequest, raw_request: Request) -> Response:
    """The speech of several texts, which are spoken at the same time."""
    return await get_handler(raw_request, "audio").create_batch(request, raw_request)
