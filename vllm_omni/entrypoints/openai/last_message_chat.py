# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions for a pipeline without a vLLM stage that reads prompts: it has no chat template.

It reads the last message. Of a diffusion model the text is the prompt, the images are its input images, and a part with
a `name` is the medium of that name of the model's pipeline. In a pipeline of functions the image, or the sound, begins
at the stage that accepts one, and the text is the request's `prompt`. Earlier turns, system messages and fields of text
sampling, which chat clients send to every model, are not used.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import Request
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.exceptions import VLLMValidationError

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.entrypoints.openai.asr_stage import sound_url
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.entrypoints.openai.chat import (
    OmniChatCompletionRequest,
    default_modalities,
    read_modalities,
    read_options,
)
from vllm_omni.entrypoints.openai.chat_media import ChatMedia, Transcripts
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_endpoint import (
    DiffusionEndpoint,
    MediaEndpoint,
    completed_event,
    final_stage,
    new_id,
)
from vllm_omni.entrypoints.openai.media_output import message_fields, to_base64, usage_of
from vllm_omni.entrypoints.openai.media_request import as_urls
from vllm_omni.entrypoints.openai.request_context import PrefetchedStream, RequestContext
from vllm_omni.entrypoints.openai.sse import DONE, Line, comment_line, sse_line, with_error
from vllm_omni.entrypoints.openai.stage_params import diffusion_settings, read_stage_params
from vllm_omni.entrypoints.openai.streamed_chat import MediaStream
from vllm_omni.events import CompletedEvent, ImageProgressEvent, OmniEvent
from vllm_omni.inputs import OmniPrompt
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.vllm_protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    DeltaMessage,
    UsageInfo,
)

_FILES = {"image": "png", "video": "mp4"}
_OWN_NAMES = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
"""Parts of a message, and the names of their media where they have none."""
_FOR_TEXT = ("tools", "response_format", "structured_outputs", "logprobs", "prompt_logprobs")
"""Fields that are refused, because a client relies on their effect."""


def media_stage(config: PipelineConfig) -> OmniStageConfig | None:
    """The stage at which the picture, or the sound, of a chat begins; None: no stage accepts one, or only to
    transcribe."""
    picture = next((stage for stage in config.stage_args if stage.accepts == "image"), None)
    return picture or config.accepting_stage("audio", "audio")


def can_chat(config: PipelineConfig) -> bool:
    """Whether such a pipeline answers a chat."""
    stage = final_stage(config, config.output_types[0])
    return media_stage(config) is not None or (stage is not None and _paints(stage))


def _paints(stage: OmniStageConfig) -> bool:
    return stage.kind.params == "diffusion"


def make_chat(client: OmniEngineClient, state: State, args: Namespace) -> LastMessageChat:
    """The handler of such a pipeline.

    Raises:
        StageConfigError: `--default-modalities` has one that the pipeline does not have.
    """
    stage = media_stage(client.config)
    if stage is not None:
        return FunctionChat(state, client, stage, args)
    stage = final_stage(client.config, client.config.output_types[0])
    assert stage is not None
    return DiffusionChat(state, client, stage, args)


@dataclass(kw_only=True)
class _Answer:
    """The answer to one request."""

    id: str
    model_name: str
    num_choices: int
    audio_format: str
    include_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, messages: Sequence[dict[str, Any]], usage: UsageInfo) -> ChatCompletionResponse:
        """`messages`: The fields of one for each choice."""
        choices = [
            ChatCompletionResponseChoice(index=i, message=ChatMessage(role="assistant", **fields))
            for i, fields in enumerate(messages)
        ]
        return ChatCompletionResponse(
            id=self.id, created=self.created, model=self.model_name, choices=choices, usage=usage
        )

    def chunk(self, choices: list[ChatCompletionResponseStreamChoice], usage: UsageInfo | None = None) -> Line:
        chunk = ChatCompletionStreamResponse(
            id=self.id, created=self.created, model=self.model_name, choices=choices, usage=usage
        )
        return sse_line(chunk.model_dump(mode="json"))


class LastMessageChat(MediaEndpoint):
    """A chat handler in place of vLLM's `OpenAIServingChat`. A derived class starts the request and renders its
    events."""

    kind = "chatcmpl"

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> ChatCompletionResponse | AsyncGenerator[Line, None]:
        """Raises `VLLMClientError` if the request is wrong, `OmniError` if it failed. Who reads a stream first awaits
        the context's `started`, or early errors are lines in it."""
        assert isinstance(request, OmniChatCompletionRequest)
        self.check_model(request.model)
        _check_fields(request)
        answer = _Answer(
            id=new_id(self.kind, raw_request),
            model_name=request.model or self.model_names[0],
            num_choices=1 if request.n is None else request.n,
            audio_format=(None if request.audio is None else request.audio.format) or "wav",
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
        )
        events = await self._start(request, answer, raw_request)
        if not request.stream:
            return await self._whole(answer, await completed_event(events))
        outputs = PrefetchedStream(events)
        RequestContext.current().outputs.append(outputs)
        return _with_end(self._lines(answer, outputs))

    async def _start(
        self, request: OmniChatCompletionRequest, answer: _Answer, raw_request: Request | None
    ) -> AsyncGenerator[OmniEvent, None]:
        raise NotImplementedError

    async def _whole(self, answer: _Answer, event: CompletedEvent) -> ChatCompletionResponse:
        raise NotImplementedError

    def _lines(self, answer: _Answer, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[Line, None]:
        raise NotImplementedError


async def _with_end(lines: AsyncGenerator[Line, None]) -> AsyncGenerator[Line, None]:
    """The lines of a chat, also after an error."""
    async with aclosing(with_error(lines, event="")) as all_lines:
        async for line in all_lines:
            yield line
    yield DONE


class DiffusionChat(LastMessageChat, DiffusionEndpoint):
    """The handler of a diffusion model. The stage is the pipeline's first final one."""

    async def _start(
        self, request: OmniChatCompletionRequest, answer: _Answer, raw_request: Request | None
    ) -> AsyncGenerator[OmniEvent, None]:
        if not _paints(self.stage):
            raise VLLMValidationError(
                "this model reads no conversation; POST /v1/audio/speech speaks a text; see GET /v1/pipeline",
                parameter="model",
            )
        self._check_outputs(request)
        prompt, urls, others = _read_last_message(request.messages)
        settings = self._settings(request, answer.num_choices)
        images = await self.media.images(urls, "messages")
        inputs = await self.read_inputs(others, bool(images), "messages")
        stream, priority = bool(request.stream), request.priority
        return self.generate(prompt, settings, images, raw_request, answer.id, inputs, stream=stream, priority=priority)

    def _check_outputs(self, request: OmniChatCompletionRequest) -> None:
        makes = self.makes
        # Chat clients ask for text beside what they want.
        asked = request.modalities
        wanted = [name for name in asked if name != "text"] if asked and makes in asked else asked
        modalities = read_modalities(wanted, self.client.config, [makes])
        if modalities != [makes]:
            raise VLLMValidationError(
                f"chat with this model returns {makes} only, not {modalities}", parameter="modalities"
            )
        if request.audio is not None and makes != "audio":
            raise VLLMValidationError(f"this model makes no sound; it makes {makes}s", parameter="audio")
        if request.audio is not None:
            self.client.voices.read(request.audio.voice_name, "audio.voice")

    def _settings(self, request: OmniChatCompletionRequest, num_choices: int) -> dict[str, Any]:
        """The settings of a request whose choices share the outputs evenly."""
        entries = read_stage_params(request.sampling_params_list, self.client.config)
        own = dict(entries[self.client.config.stage_args.index(self.stage)] or {})
        own |= diffusion_settings({name: getattr(request, name) for name in request.model_fields_set}, adapters=True)
        if self.info is not None and self.makes in _FILES and "output_format" not in own:
            own["output_format"] = _FILES[self.makes]
        if num_choices < 1:
            raise VLLMValidationError(f"n must be at least 1, not {num_choices}", parameter="n")
        if num_choices > 1:
            own["num_outputs_per_prompt"] = num_choices * own.get("num_outputs_per_prompt", 1)
        return self.with_adapter(own, request.model)

    async def _whole(self, answer: _Answer, event: CompletedEvent) -> ChatCompletionResponse:
        output = event.outputs[0]
        return answer.whole(await asyncio.to_thread(_messages, answer, output), _usage(output))

    async def _lines(self, answer: _Answer, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[Line, None]:
        """Steps as comments, which clients skip; then each choice in one chunk."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ImageProgressEvent):
                    yield comment_line(f"output {event.index}, step {event.step + 1} of {event.num_steps}")
                elif isinstance(event, CompletedEvent):
                    for line in await asyncio.to_thread(_chunks, answer, event.outputs[0]):
                        yield line


def _chunks(answer: _Answer, output: OmniRequestOutput) -> list[Line]:
    chunks = []
    for i, fields in enumerate(_messages(answer, output)):
        delta = DeltaMessage(role="assistant", **fields)
        chunks.append(answer.chunk([ChatCompletionResponseStreamChoice(index=i, delta=delta)]))
        end = ChatCompletionResponseStreamChoice(index=i, delta=DeltaMessage(), finish_reason="stop")
        chunks.append(answer.chunk([end]))
    if answer.include_usage:
        chunks.append(answer.chunk([], _usage(output)))
    return chunks


def _messages(answer: _Answer, output: OmniRequestOutput) -> list[dict[str, Any]]:
    """Fields of the messages, one for each choice. Takes long for large files."""
    if output.final_output_type != "audio":
        ((name, parts),) = message_fields(output).items()
        size = len(parts) // answer.num_choices
        return [{name: parts[i * size : (i + 1) * size]} for i in range(answer.num_choices)]
    assert output.sample_rate is not None
    sounds = [
        {
            "id": f"audio-{answer.id}-{i}",
            "data": to_base64(encode_audio(clip.numpy(), answer.audio_format, output.sample_rate)),
            "expires_at": int(time.time()),  # A later turn cannot name it.
            "transcript": "",
        }
        for i, clip in enumerate(output.multimodal_output["audio"])  # [clips, channels, samples]
    ]
    return [{"audio": sound} for sound in sounds]


class FunctionChat(LastMessageChat):
    """The handler of a pipeline of functions: the text and the speech that it makes of a picture, or of a sound. The
    stage is the `media_stage`."""

    def __init__(self, state: State, client: OmniEngineClient, stage: OmniStageConfig, args: Namespace) -> None:
        super().__init__(state, client, stage, args)
        self._default_modalities = default_modalities(args.default_modalities, client.config)
        self._transcripts = Transcripts()

    async def _start(
        self, request: OmniChatCompletionRequest, answer: _Answer, raw_request: Request | None
    ) -> AsyncGenerator[OmniEvent, None]:
        if answer.num_choices != 1:
            raise VLLMValidationError(f"this model has one answer; n must be 1, not {request.n}", parameter="n")
        options = RequestContext.current().options = read_options(request, self.client, self._default_modalities)
        prompt = {**options.prompt, **await self._read_prompt(request), "modalities": [*options.modalities]}
        stream = bool(request.stream)
        return self.start(
            cast(OmniPrompt, prompt),
            list(options.stage_params or ()),
            raw_request,
            answer.id,
            stream=stream,
            keep_outputs=not stream,
            priority=request.priority,
        )

    async def _read_prompt(self, request: OmniChatCompletionRequest) -> OmniPrompt:
        text, images, others = _read_last_message(request.messages)
        kind = str(self.stage.accepts)
        urls = images if kind == "image" else others.pop("audio", [])
        others |= {"image": images} if images and kind != "image" else {}
        if len(urls) != 1 or others:
            raise VLLMValidationError(
                f"this model reads the {kind} of the last message: one part of type {kind}_url, not {len(urls)}"
                + (f", and no {', '.join(others)}" if others else ""),
                parameter="messages",
            )
        medium: Any = None
        if kind == "image":
            (medium,) = await self.media.images(urls, "messages")
        else:
            medium = await self.media.sound(urls[0], "messages")
        return OmniPrompt(prompt=text, stage=self.stage.name, multi_modal_data={kind: medium})

    async def _whole(self, answer: _Answer, event: CompletedEvent) -> ChatCompletionResponse:
        written = next((output for output in event.outputs if output.final_output_type == "text"), None)
        whole = answer.whole([{"content": None if written is None else written.outputs[0].text}], UsageInfo())
        await ChatMedia(RequestContext.current(), self.client.config, self._transcripts).add(whole, event)
        return whole

    async def _lines(self, answer: _Answer, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[Line, None]:
        own = RequestContext.current(), self.client.config, self._transcripts
        stream = MediaStream(events, answer.id, answer.model_name, *own, has_handler=False)
        nothing: Any = stream.text()  # No output is vLLM's.
        async with aclosing(stream.answer(nothing)) as lines:
            async for line in lines:
                yield line
        if answer.include_usage:
            yield answer.chunk([], UsageInfo())


def _check_fields(request: OmniChatCompletionRequest) -> None:
    """Refuses the fields of a chat whose effect a client relies on, and which only models that write tokens have."""
    for name in _FOR_TEXT:
        if getattr(request, name) and not _is_plain_text(getattr(request, name)):
            raise VLLMValidationError(f"{name} is for models that write; this one does not", parameter=name)


def _read_last_message(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], dict[str, list[str]]]:
    """The prompt of a model without a chat template, the addresses of its input images, and those of its other media
    by name.

    Raises:
        VLLMValidationError: The messages have content that it does not read.
    """
    if not messages or _field(messages[-1], "role") != "user":
        raise _refusal("the last message must be the user's; its text is the prompt")
    content = _field(messages[-1], "content")
    texts: list[Any] = []
    urls: list[Any] = []
    others: dict[str, list[Any]] = {}
    for part in content if isinstance(content, list) else [content]:
        kind = "text" if isinstance(part, str) else _field(part, "type")
        if kind == "text":
            texts.append(part if isinstance(part, str) else _field(part, "text"))
        elif kind in _OWN_NAMES:
            name = _field(part, "name") or _OWN_NAMES[kind]
            addresses = [sound_url(part)] if kind == "input_audio" else as_urls(_field(part, kind), kind)
            if name == "image":
                urls += addresses
            else:
                others[str(name)] = others.get(str(name), []) + addresses
        else:
            raise _refusal(f"this model takes parts of type text, {', '.join(_OWN_NAMES)}, not {kind!r}")
    if not all(isinstance(value, str) for value in (*texts, *urls, *itertools.chain(*others.values()))):
        raise _refusal("a part of type text has a text, and one of type image_url, video_url, ... an object with a url")
    return "\n".join(texts), urls, others


def _is_plain_text(value: Any) -> bool:
    """Whether it is the `response_format` that every answer has."""
    return getattr(value, "type", None) == "text"


def _field(value: Any, name: str) -> Any:
    """A field of a client's value, which may be no object."""
    return value.get(name) if isinstance(value, Mapping) else None


def _refusal(message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="messages")


def _usage(output: OmniRequestOutput) -> UsageInfo:
    used = usage_of(output)
    return UsageInfo(
        prompt_tokens=used.input_tokens, completion_tokens=used.output_tokens, total_tokens=used.total_tokens
    )
