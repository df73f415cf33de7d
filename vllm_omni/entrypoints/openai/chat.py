# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions and /v1/completions for a pipeline with a vLLM stage that reads prompts.

vLLM's routes and handlers answer with the text; `chat_media.py` and `streamed_chat.py` add all other outputs.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self, cast

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, ModelWrapValidatorHandler, Tag, model_validator
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion as vllm_create_chat_completion
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.api_router import create_completion as vllm_create_completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.parser.abstract_parser import Parser

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.engine.input_processor import describe_refusal
from vllm_omni.engine.media_tokens import MediaTokens
from vllm_omni.entrypoints.openai.asr_stage import ASRStage
from vllm_omni.entrypoints.openai.chat_media import ChatMedia, Transcripts
from vllm_omni.entrypoints.openai.chat_messages import read_messages
from vllm_omni.entrypoints.openai.engine_client import EngineOutput, OmniEngineClient, split_outputs
from vllm_omni.entrypoints.openai.http_errors import describe_errors, returned_error
from vllm_omni.entrypoints.openai.request_context import RequestContext, RequestOptions
from vllm_omni.entrypoints.openai.server_args import Modality, flag
from vllm_omni.entrypoints.openai.sse import MEDIA_TYPE, Line, defer_headers
from vllm_omni.entrypoints.openai.stage_params import (
    diffusion_settings,
    explicit_fields,
    read_stage_params,
    without_nulls,
)
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta, DeltaStream, MediaStream
from vllm_omni.errors import StageConfigError
from vllm_omni.events import CompletedEvent
from vllm_omni.inputs import VOICE_FIELD, ReplyParsers, SpokenText
from vllm_omni.vllm_protocol import ChatCompletionRequest, ChatCompletionResponse, ErrorResponse

AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16", "pcm"]

# They change what the model reads and not how much work it is, so every client may set them.
HARMLESS_MM_KWARGS = {"use_audio_in_video"}
# What vLLM's parsers of a reply read of a request.
PARSED_FIELDS = {
    "tools", "tool_choice", "parallel_tool_calls", "skip_special_tokens", "spaces_between_special_tokens",
}  # fmt: skip


class AudioVoice(OpenAIBaseModel):
    id: str = Field(description="Its name.")


class ChatAudio(OpenAIBaseModel):
    """Format and voice of the speech of an answer."""

    format: AudioFormat | None = Field(None, description="Default: wav, and pcm16 in a stream.")
    voice: str | AudioVoice | None = Field(
        None, description="One of GET /v1/audio/voices; default: the first of them.", examples=["alloy"]
    )

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, AudioVoice) else self.voice


class OmniChatCompletionRequest(ChatCompletionRequest):
    """OpenAI's and vLLM's fields, and those of a pipeline of stages."""

    modalities: list[Modality] | None = Field(
        None,
        description="The outputs of the answer. Default: those of --default-modalities, else text, and of a model that "
        "writes no text all that it makes.",
        examples=[["text", "audio"]],
    )
    audio: ChatAudio | None = Field(None, description="Format and voice of the speech.")
    sampling_params_list: list[dict[str, Any] | None] | None = Field(
        None,
        description="Sampling parameters of each stage, in stage order; null for a stage's defaults. OpenAI's own "
        "fields apply to the stage that reads the prompt, and win over its entry here.",
        examples=[[{"temperature": 0.0}, {"temperature": 0.9}, None]],
    )
    extra_body: dict[str, Any] | None = Field(
        None,
        description="Settings of a diffusion model: height, width, num_inference_steps, guidance_scale, "
        "true_cfg_scale, seed, negative_prompt, num_outputs_per_prompt, num_frames.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_malformed_fields(cls, data: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """vLLM's validators read the raw fields and raise these errors if one has another type."""
        if isinstance(data, Mapping):
            data = without_nulls(data)
            if data.get("tools") == []:
                del data["tools"]
            if "tools" not in data and data.get("tool_choice") in ("auto", "none"):
                del data["tool_choice"]
            if "messages" in data:
                data["messages"] = read_messages(data["messages"])
        try:
            return check(data)
        except KeyError as error:
            raise ValueError(f"the field {error} is missing") from error
        except (AttributeError, IndexError, TypeError) as error:
            raise ValueError(f"a field has a wrong type: {error}") from error


class OmniServing(GenerateBaseServing):
    """One of vLLM's handlers on an `OmniEngineClient`. Derive from it and from the handler's class."""

    create_error_response = staticmethod(returned_error)

    default_sampling_params: dict[str, Any]

    @classmethod
    def from_vllm(cls, handler: GenerateBaseServing, **attributes: Any) -> Self:
        """Ours in place of a handler that vLLM has made, so that its constructor's arguments remain vLLM's.

        Args:
            attributes: Further ones, or in place of its own.
        """
        ours = cls.__new__(cls)
        vars(ours).update(vars(handler), **attributes)
        ours.default_sampling_params = ours.client.default_sampling_params
        return ours

    @property
    def client(self) -> OmniEngineClient:
        return cast(OmniEngineClient, self.engine_client)


class OmniServingCompletion(OmniServing, OpenAIServingCompletion):
    """vLLM's, sampling as the stage is configured. Text only."""

    async def create_completion(
        self, request: CompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | CompletionResponse | ErrorResponse:
        """Completes texts. Who reads a stream first awaits the context's `started`, or early errors are lines in it."""
        RequestContext.current().options = RequestOptions(explicit_fields=explicit_fields(request))
        return await super().create_completion(request, raw_request)


class OmniServingChatBatch(OmniServing, OpenAIServingChatBatch):
    """vLLM's, sampling as the stage is configured. Text only. Its conversations count as choices of a chat do."""

    async def create_batch_chat_completion(
        self, request: BatchChatCompletionRequest, raw_request: Request | None = None
    ) -> ChatCompletionResponse | ErrorResponse:
        limit = self.client.limits.max_n
        if len(request.messages) > limit:
            raise VLLMValidationError(
                f"messages has {len(request.messages)} conversations; a request may have at most {limit} "
                f"({flag('max_n')})",
                parameter="messages",
            )
        self.client.check_admission(len(request.messages))
        RequestContext.current().options = RequestOptions(explicit_fields=explicit_fields(request))
        return await super().create_batch_chat_completion(request, raw_request)


class OmniServingChat(OmniServing, OpenAIServingChat):
    """vLLM's handler for the text, with all other outputs of the pipeline.

    Attributes:
        default_modalities: The outputs of a request without `modalities`.
        transcripts: Those of earlier speech.
        parsers: Those of `parser_cls`.
        asr_stage: Transcribes the sounds of messages, for a model that reads text; None: the model reads them.
    """

    default_modalities: Sequence[str]
    transcripts: Transcripts
    parsers: ReplyParsers
    asr_stage: ASRStage | None = None

    @classmethod
    def from_vllm(cls, handler: GenerateBaseServing, **attributes: Any) -> Self:
        ours = super().from_vllm(handler, transcripts=Transcripts(), **attributes)
        ours.online_renderer = cast(Any, _Renderer(ours.online_renderer, ours.client))
        return ours

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """Answers a chat. Who reads a stream first awaits the context's `started`, or early errors are lines in it."""
        assert isinstance(request, OmniChatCompletionRequest)
        context = RequestContext.current()
        request.messages = self.transcripts.fill_in(request.messages, context.owner)
        if self.asr_stage is not None:
            request.messages = await self.asr_stage.as_text(request.messages)
        context.options = read_options(request, self.client, self.default_modalities)
        return await super().create_chat_completion(request, raw_request)

    async def create_deltas(
        self, request: OmniChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[ChatDelta, None] | ErrorResponse:
        """Answers a streamed chat of one choice in typed deltas; else as `create_chat_completion`."""
        RequestContext.current().reads_deltas = True
        answer: Any = await self.create_chat_completion(request, raw_request)
        return answer

    def _engine_reasoning_kwargs(
        self,
        request: ChatCompletionRequest,
        parser: Parser | None,
        chat_template_kwargs: dict[str, Any],
        prompt_token_ids: list[int] | None,
    ) -> dict[str, Any]:
        """vLLM's arguments of `generate`, and which part of the reply is spoken."""
        arguments = super()._engine_reasoning_kwargs(request, parser, chat_template_kwargs, prompt_token_ids)
        calls_tools = bool(request.tools) and request.tool_choice != "none"
        if parser is None or not (calls_tools or self.parsers.reasoning_parser):
            return arguments
        fields = request.model_dump(mode="json", include=PARSED_FIELDS, exclude_none=True)
        fields["chat_template_kwargs"] = chat_template_kwargs
        spoken_text = SpokenText(parsers=self.parsers, request=fields)
        RequestContext.current().spoken_text = spoken_text
        return {**arguments, "spoken_text": spoken_text}

    async def chat_completion_full_generator(  # type: ignore[override]
        self,
        request: OmniChatCompletionRequest,
        result_generator: AsyncGenerator[EngineOutput, None],
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> ErrorResponse | ChatCompletionResponse:
        context = RequestContext.current()
        context.mm_token_counts = kwargs.get("mm_token_counts") or {}
        completed: list[CompletedEvent] = []
        text = split_outputs(result_generator, completed)
        answer = await super().chat_completion_full_generator(request, text, request_id, *args, **kwargs)
        if isinstance(answer, ChatCompletionResponse) and completed:
            await ChatMedia(context, self.client.config, self.transcripts).add(answer, completed[0])
        return answer

    def chat_completion_stream_generator(  # type: ignore[override]
        self,
        request: OmniChatCompletionRequest,
        result_generator: AsyncGenerator[EngineOutput, None],
        request_id: str,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[Line, None] | AsyncGenerator[ChatDelta, None]:
        context = RequestContext.current()
        context.mm_token_counts = kwargs.get("mm_token_counts") or {}
        own = context, self.client.config, self.transcripts
        stream: DeltaStream | MediaStream = (
            DeltaStream(result_generator, *own)
            if context.reads_deltas
            else MediaStream(result_generator, request_id, model_name, *own)
        )
        text = super().chat_completion_stream_generator(request, stream.text(), request_id, model_name, *args, **kwargs)
        return stream.answer(text) if context.reads_deltas or context.options.has_media else text


class _Renderer:
    """vLLM's renderer, that accepts `HARMLESS_MM_KWARGS` of every client, and has tokens of media counted."""

    def __init__(self, renderer: Any, client: OmniEngineClient) -> None:
        self._renderer = renderer
        processor = client.renderer.mm_processor
        self._media_tokens = None
        if processor is not None:
            self._media_tokens = MediaTokens(processor, client.model_config.max_model_len)
        self._trusting_renderer = copy.copy(renderer)
        self._trusting_renderer.trust_request_mm_kwargs = True

    def __getattr__(self, name: str) -> Any:
        """The renderer's settings, which vLLM's handlers read."""
        return getattr(self._renderer, name)

    async def render_chat(self, request: ChatCompletionRequest, **options: Any) -> Any:
        with self._renderer_for(request, "messages") as renderer:
            if (fit := RequestContext.current().fit_prompt) is not None:
                return await fit(request, renderer.render_chat)
            return await renderer.render_chat(request, **options)

    async def render_responses(self, request: ResponsesRequest, **history: Any) -> Any:
        with self._renderer_for(request, "input") as renderer:
            return await renderer.render_responses(request, **history)

    @contextmanager
    def _renderer_for(self, request: ChatCompletionRequest | ResponsesRequest, parameter: str) -> Iterator[Any]:
        mm_kwargs = request.mm_processor_kwargs or {}
        is_harmless = set(mm_kwargs) <= HARMLESS_MM_KWARGS and not request.media_io_kwargs
        context = RequestContext.current()
        context.media_tokens = self._media_tokens if is_harmless else None
        context.reads_sound_in_video = bool(mm_kwargs.get("use_audio_in_video"))
        try:
            yield self._trusting_renderer if is_harmless else self._renderer
        except VLLMClientError:
            raise
        except ValueError as error:
            raise VLLMValidationError(describe_refusal(error), parameter=parameter) from error


def read_options(
    request: OmniChatCompletionRequest, client: OmniEngineClient, default_modalities: Sequence[str]
) -> RequestOptions:
    """
    Args:
        default_modalities: The outputs of a request without `modalities`.

    Raises:
        VLLMValidationError: The model does not support an output or a setting; lists the supported ones.
    """
    wanted = read_modalities(request.modalities, client.config, default_modalities)
    if set(wanted) != {"text"} and request.use_beam_search:
        raise VLLMValidationError(
            f"beam search is for text only; leave it out, or set modalities to ['text'] (not {wanted})",
            parameter="use_beam_search",
        )
    # The text is made for speech anyway, and returned as its transcript.
    needed = dict.fromkeys([*(["text"] if "text" in client.config.output_types else []), *wanted])
    audio_format = None if request.audio is None else request.audio.format
    return RequestOptions(
        modalities=tuple(needed),
        stage_params=_stage_params(request, client.config),
        explicit_fields=explicit_fields(request),
        prompt=_voice(request, client, wanted),
        shows_text="text" in wanted,
        audio_format=audio_format or ("pcm16" if request.stream else "wav"),
    )


def default_modalities(given: Sequence[str] | None, config: PipelineConfig) -> list[str]:
    """The outputs of a request without `modalities`: text, as in OpenAI's API, or all if the pipeline has no text.

    Args:
        given: `--default-modalities`, which replaces this.

    Raises:
        StageConfigError: The pipeline does not have one of them.
    """
    known = config.output_types
    for modality in given or ():
        if modality not in known:
            raise StageConfigError(
                f"--default-modalities {modality}: this model cannot output it; it outputs {', '.join(known)}"
            )
    return list(given or (["text"] if "text" in known else known))


def read_modalities(modalities: list[Any] | None, config: PipelineConfig, default: Sequence[str]) -> list[str]:
    """The outputs of a request.

    Raises:
        VLLMValidationError: The list is empty, or has one that the pipeline does not have.
    """
    known = config.output_types
    if modalities is None:
        return list(default)
    for modality in modalities:
        if modality not in known:
            raise VLLMValidationError(
                f"this model cannot output {modality!r}; it outputs {', '.join(known)}",
                parameter="modalities",
                value=modality,
            )
    if not modalities:
        raise VLLMValidationError(f"modalities is empty; name some of {', '.join(known)}", parameter="modalities")
    return list(modalities)


def _stage_params(request: OmniChatCompletionRequest, config: PipelineConfig) -> list[Mapping[str, Any] | None]:
    params = read_stage_params(request.sampling_params_list, config)
    denoisers = [i for i, stage in enumerate(config.stage_args) if stage.kind.takes_settings]
    if request.extra_body and not denoisers:
        raise VLLMValidationError(
            "extra_body holds the settings of a diffusion model, and this model has none", parameter="extra_body"
        )
    for i in denoisers:
        params[i] = {**(params[i] or {}), **diffusion_settings(request.extra_body or {})}
    return params


def _voice(request: OmniChatCompletionRequest, client: OmniEngineClient, modalities: Sequence[str]) -> dict[str, Any]:
    if request.audio is None:
        return {}
    if "audio" not in client.config.output_types:
        raise VLLMValidationError(
            f"this model cannot speak; it outputs {', '.join(client.config.output_types)}", parameter="audio"
        )
    if "audio" not in modalities:
        raise VLLMValidationError(
            f"audio sets how an answer is spoken, and this one is not (modalities: {', '.join(modalities)}); "
            "add 'audio' to modalities, or leave audio out",
            parameter="audio",
        )
    voice = client.voices.read(request.audio.voice_name, "audio.voice")
    return {} if voice is None else {"additional_information": {VOICE_FIELD: voice}}


INVOCATIONS_PATH = "/invocations"

router = APIRouter()
_ROUTE: dict[str, Any] = {
    "responses": {HTTPStatus.OK.value: {"content": {MEDIA_TYPE: {}}}, **describe_errors()},
}


@router.post("/v1/chat/completions", **_ROUTE)
async def create_chat_completion(request: OmniChatCompletionRequest, raw_request: Request) -> Any:
    """Text, speech, images or videos as the answer to a conversation, whole or as a stream."""
    return defer_headers(await vllm_create_chat_completion(request, raw_request), RequestContext.of(raw_request))


@router.post("/v1/completions", **_ROUTE)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Any:
    """The continuation of one or more texts, whole or as a stream."""
    return defer_headers(await vllm_create_completion(request, raw_request), RequestContext.of(raw_request))


def _invoked(body: Any) -> str:
    """A tag, which errors name on the way to a wrong field; so it is none that a field could have."""
    return "<completion>" if isinstance(body, dict) and "prompt" in body and "messages" not in body else "<chat>"


_Invocation = Annotated[
    Annotated[OmniChatCompletionRequest, Tag("<chat>")] | Annotated[CompletionRequest, Tag("<completion>")],
    Discriminator(_invoked),
]


@router.post(INVOCATIONS_PATH, **_ROUTE)
async def invoke(request: _Invocation, raw_request: Request) -> Any:
    """A chat or a completion, by what the body has: `messages` or `prompt`. The path is Amazon SageMaker's."""
    if isinstance(request, CompletionRequest):
        return await create_completion(request, raw_request)
    return await create_chat_completion(request, raw_request)
