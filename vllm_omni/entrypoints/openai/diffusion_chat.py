# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions for a pipeline without a vLLM stage that reads prompts: a diffusion model.

It has no chat template. Its prompt is the text of the last message, its input images are those of that message; a part
with a `name` is the medium of that name of the model's pipeline. Earlier turns, system messages and fields of text
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
from typing import Any

from fastapi import Request
from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.exceptions import VLLMValidationError

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.entrypoints.openai.asr_stage import sound_url
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest, read_modalities
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_endpoint import DiffusionEndpoint, completed, final_stage, new_id
from vllm_omni.entrypoints.openai.media_output import message_fields, to_base64, usage_of
from vllm_omni.entrypoints.openai.media_request import as_urls
from vllm_omni.entrypoints.openai.request_context import started
from vllm_omni.entrypoints.openai.sse import DONE, Line, comment_line, sse_line, with_error
from vllm_omni.entrypoints.openai.stage_params import diffusion_settings, read_stage_params
from vllm_omni.events import CompletedEvent, ImageProgressEvent, OmniEvent
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


def can_chat(stage: OmniStageConfig) -> bool:
    """Whether a final stage answers a chat whose messages no stage reads: a diffusion model, with what it paints."""
    return stage.kind.params == "diffusion"


class DiffusionChat(DiffusionEndpoint):
    """The chat handler of a diffusion model, in place of vLLM's `OpenAIServingChat`."""

    kind = "chatcmpl"

    def __init__(self, client: OmniEngineClient, state: State, args: Namespace) -> None:
        """The stage is the pipeline's first final one."""
        stage = final_stage(client.config, client.config.output_types[0])
        assert stage is not None
        super().__init__(state, client, stage, args)

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> ChatCompletionResponse | AsyncGenerator[Line, None]:
        """Raises `VLLMClientError` if the request is wrong, `OmniError` if it failed."""
        assert isinstance(request, OmniChatCompletionRequest)
        self.check_model(request.model)
        if not can_chat(self.stage):
            raise VLLMValidationError(
                "this model reads no conversation; POST /v1/audio/speech speaks a text; see GET /v1/pipeline",
                parameter="model",
            )
        check_fields(request)
        self._check_outputs(request)
        prompt, urls, others = read_last_message(request.messages)
        settings = self._settings(request)
        answer = _Answer(
            id=new_id(self.kind, raw_request),
            model_name=request.model or self.model_names[0],
            num_choices=_count_choices(request, settings),
            audio_format=(None if request.audio is None else request.audio.format) or "wav",
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
        )
        images = await self.media.images(urls, "messages")
        inputs = await self.read_inputs(others, bool(images), "messages")
        stream, priority = bool(request.stream), request.priority
        events = self.generate(
            prompt, settings, images, raw_request, answer.id, inputs, stream=stream, priority=priority
        )
        if request.stream:
            return answer.stream(await started(events))
        return await asyncio.to_thread(answer.whole, await completed(events))

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

    def _settings(self, request: OmniChatCompletionRequest) -> dict[str, Any]:
        entries = read_stage_params(request.sampling_params_list, self.client.config)
        own = dict(entries[self.client.config.stage_args.index(self.stage)] or {})
        own |= diffusion_settings({name: getattr(request, name) for name in request.model_fields_set}, adapters=True)
        if self.info is not None and self.makes in _FILES and "output_format" not in own:
            own["output_format"] = _FILES[self.makes]
        return self.with_adapter(own, request.model)


def _count_choices(request: OmniChatCompletionRequest, settings: dict[str, Any]) -> int:
    """The choices of an answer, which share the outputs evenly; adds the number of outputs to the settings."""
    num_choices = 1 if request.n is None else request.n
    if num_choices < 1:
        raise VLLMValidationError(f"n must be at least 1, not {num_choices}", parameter="n")
    if num_choices > 1:
        settings["num_outputs_per_prompt"] = num_choices * settings.get("num_outputs_per_prompt", 1)
    return num_choices


@dataclass(kw_only=True)
class _Answer:
    """The answer to one request."""

    id: str
    model_name: str
    num_choices: int
    audio_format: str
    include_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, output: OmniRequestOutput) -> ChatCompletionResponse:
        """Takes long for large files."""
        return ChatCompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model_name,
            choices=[
                ChatCompletionResponseChoice(index=i, message=ChatMessage(role="assistant", **fields))
                for i, fields in enumerate(self._messages(output))
            ],
            usage=_usage(output),
        )

    async def stream(self, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[Line, None]:
        """The lines of a chat, also after an error."""
        async with aclosing(with_error(self._lines(events), event="")) as lines:
            async for line in lines:
                yield line
        yield DONE

    async def _lines(self, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[Line, None]:
        """Steps as comments, which clients skip; then each choice in one chunk."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ImageProgressEvent):
                    yield comment_line(f"output {event.index}, step {event.step + 1} of {event.num_steps}")
                elif isinstance(event, CompletedEvent):
                    for line in await asyncio.to_thread(self._chunks, event.outputs[0]):
                        yield line

    def _chunks(self, output: OmniRequestOutput) -> list[Line]:
        chunks = []
        for i, fields in enumerate(self._messages(output)):
            delta = DeltaMessage(role="assistant", **fields)
            chunks.append(self._chunk([ChatCompletionResponseStreamChoice(index=i, delta=delta)]))
            end = ChatCompletionResponseStreamChoice(index=i, delta=DeltaMessage(), finish_reason="stop")
            chunks.append(self._chunk([end]))
        if self.include_usage:
            chunks.append(self._chunk([], usage=_usage(output)))
        return chunks

    def _chunk(self, choices: list[ChatCompletionResponseStreamChoice], **more: Any) -> Line:
        chunk = ChatCompletionStreamResponse(
            id=self.id, created=self.created, model=self.model_name, choices=choices, **more
        )
        return sse_line(chunk.model_dump(mode="json"))

    def _messages(self, output: OmniRequestOutput) -> list[dict[str, Any]]:
        """Fields of the messages, one for each choice."""
        if output.final_output_type == "audio":
            return [{"audio": audio} for audio in self._audio(output)]
        ((name, parts),) = message_fields(output).items()
        size = len(parts) // self.num_choices
        return [{name: parts[i * size : (i + 1) * size]} for i in range(self.num_choices)]

    def _audio(self, output: OmniRequestOutput) -> list[dict[str, Any]]:
        """One for each clip; `[clips, channels, samples]`."""
        assert output.sample_rate is not None
        return [
            {
                "id": f"audio-{self.id}-{i}",
                "data": to_base64(encode_audio(clip.numpy(), self.audio_format, output.sample_rate)),
                "expires_at": int(time.time()),  # A later turn cannot name it.
                "transcript": "",
            }
            for i, clip in enumerate(output.multimodal_output["audio"])
        ]


def check_fields(request: OmniChatCompletionRequest) -> None:
    """Refuses the fields of a chat whose effect a client relies on, and which only models that write tokens have."""
    for name in _FOR_TEXT:
        if getattr(request, name) and not _is_plain_text(getattr(request, name)):
            raise VLLMValidationError(f"{name} is for models that write; this one does not", parameter=name)


def read_last_message(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], dict[str, list[str]]]:
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
