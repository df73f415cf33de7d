# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions for a pipeline that no vLLM stage reads prompts for: a diffusion model.

It has no chat template. Its prompt is the text of the last message, and the pictures of that message are what it looks
at. Earlier turns are not for it, and fields about how text is sampled say nothing to it.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from PIL import Image
from starlette.datastructures import State
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
)
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.entrypoints.openai.chat_media import picture_fields
from vllm_omni.entrypoints.openai.chat_options import read_modalities
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.images import usage_of
from vllm_omni.entrypoints.openai.media_inputs import ImageFetcher, as_urls
from vllm_omni.entrypoints.openai.media_messages import diffusion_settings, to_base64
from vllm_omni.entrypoints.openai.media_stage import MediaMaker, MediaStage, begun, completed, new_id
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.stage_params import read_stage_params
from vllm_omni.errors import OmniError, StageConfigError
from vllm_omni.events import CompletedEvent, ImageProgressEvent, OmniEvent
from vllm_omni.outputs import OmniRequestOutput

_FILES = {"image": "png", "video": "mp4"}
_FOR_TEXT = ("tools", "response_format", "structured_outputs", "logprobs", "prompt_logprobs")
"""Fields whose effect a client would miss."""


@dataclass(frozen=True)
class _Question:
    """A request, read.

    Attributes:
        prompt: The text of the last message.
        urls: Its pictures.
        settings: Fields of `DiffusionSamplingParams`.
        num_choices: Answers, which share the outputs evenly.
        audio_format: How sound is encoded.
    """

    prompt: str
    urls: list[str]
    settings: dict[str, Any]
    num_choices: int
    audio_format: str


class DiffusionChat:
    """Stands where vLLM's routes look for `OpenAIServingChat`."""

    def __init__(self, client: OmniEngineClient, state: State, args: Namespace) -> None:
        """
        Args:
            state: Of the application; knows the names that the model is served under.
            args: Of `vllm serve`.

        Raises:
            StageConfigError: The pipeline gives its callers nothing.
        """
        if not client.config.output_types:
            raise StageConfigError("no stage of the pipeline has final_output: true, so that there is no answer")
        stage = MediaStage.find(client.config, client.config.output_types[0], args.model)
        assert stage is not None
        self._maker = MediaMaker(client, state.openai_serving_models, stage)
        self._fetcher = ImageFetcher(args)

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> ChatCompletionResponse | AsyncGenerator[str, None]:
        """
        Raises:
            VLLMClientError, OmniError: The request is wrong; it failed.
        """
        assert isinstance(request, OmniChatCompletionRequest)
        self._maker.check_model(request.model)
        question = self._read(request)
        self._maker.client.check_admission()  # Before pictures are fetched that nobody will look at.
        images = await self._fetcher.fetch(question.urls, "messages")
        answer = _Answer(request, question, new_id("chatcmpl", raw_request), self._maker)
        events = self._events(question, images, answer.id, raw_request, bool(request.stream))
        if request.stream:
            return answer.stream(await begun(events))
        return await asyncio.to_thread(answer.whole, await completed(events))

    def _events(
        self,
        question: _Question,
        images: list[Image.Image],
        request_id: str,
        raw_request: Request | None,
        stream: bool,
    ) -> AsyncGenerator[OmniEvent, None]:
        return self._maker.events(
            question.prompt, question.settings, images, raw_request, request_id=request_id, stream=stream
        )

    def _read(self, request: OmniChatCompletionRequest) -> _Question:
        for name in _FOR_TEXT:
            if getattr(request, name):
                raise VLLMValidationError(f"{name} is for models that write; this one does not", parameter=name)
        self._check_outputs(request)
        prompt, urls = read_last_message(request.messages)
        settings = self._settings(request)
        num_choices = 1 if request.n is None else request.n
        if num_choices < 1:
            raise VLLMValidationError(f"n must be at least 1, not {num_choices}", parameter="n")
        if num_choices > 1:
            settings["num_outputs_per_prompt"] = num_choices * settings.get("num_outputs_per_prompt", 1)
        audio_format = (None if request.audio is None else request.audio.format) or "wav"
        return _Question(prompt, urls, settings, num_choices, audio_format)

    def _check_outputs(self, request: OmniChatCompletionRequest) -> None:
        makes = self._maker.stage.makes
        modalities = read_modalities(request.modalities, self._maker.client.config, [makes])
        if modalities != [makes]:
            raise VLLMValidationError(
                f"chat with this model returns {makes} only, not {modalities}", parameter="modalities"
            )
        if request.audio is not None and makes != "audio":
            raise VLLMValidationError(f"this model makes no sound; it makes {makes}s", parameter="audio")
        if request.audio is not None:
            self._maker.client.voices.read(request.audio.voice_name, "audio.voice")

    def _settings(self, request: OmniChatCompletionRequest) -> dict[str, Any]:
        stage = self._maker.stage
        entries = read_stage_params(request.sampling_params_list, stage.config)
        own = dict(entries[stage.config.stage_args.index(stage.stage)] or {})
        own |= diffusion_settings({name: getattr(request, name) for name in request.model_fields_set}, adapters=True)
        if stage.info is not None and stage.makes in _FILES and "output_format" not in own:
            own["output_format"] = _FILES[stage.makes]
        return self._maker.with_adapter(own, request.model)


class _Answer:
    """How a request is answered."""

    def __init__(
        self, request: OmniChatCompletionRequest, question: _Question, answer_id: str, maker: MediaMaker
    ) -> None:
        self.id = answer_id
        self._created = int(time.time())
        self._question = question
        self._model_name = request.model or maker.model_name
        self._tells_usage = bool(request.stream_options and request.stream_options.include_usage)

    def whole(self, output: OmniRequestOutput) -> ChatCompletionResponse:
        """Takes its time where files are large."""
        return ChatCompletionResponse(
            id=self.id,
            created=self._created,
            model=self._model_name,
            choices=[
                ChatCompletionResponseChoice(index=i, message=ChatMessage(role="assistant", **fields))
                for i, fields in enumerate(self._messages(output))
            ],
            usage=_usage(output),
        )

    async def stream(self, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[str, None]:
        """Steps as comments, which clients skip; then each answer in one piece."""
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, ImageProgressEvent):
                        yield f": output {event.index}, step {event.step + 1} of {event.num_steps}\n\n"
                    elif isinstance(event, CompletedEvent):
                        for text in await asyncio.to_thread(self._chunks, event.outputs[0]):
                            yield text
        except OmniError as error:
            yield f"data: {create_error_response(to_http_error(error)).model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"

    def _chunks(self, output: OmniRequestOutput) -> list[str]:
        chunks = []
        for i, fields in enumerate(self._messages(output)):
            delta = DeltaMessage(role="assistant", **fields)
            chunks.append(self._chunk([ChatCompletionResponseStreamChoice(index=i, delta=delta)]))
            end = ChatCompletionResponseStreamChoice(index=i, delta=DeltaMessage(), finish_reason="stop")
            chunks.append(self._chunk([end]))
        if self._tells_usage:
            chunks.append(self._chunk([], usage=_usage(output)))
        return chunks

    def _chunk(self, choices: list[ChatCompletionResponseStreamChoice], **more: Any) -> str:
        chunk = ChatCompletionStreamResponse(
            id=self.id,
            created=self._created,
            model=self._model_name,
            choices=choices,
            **more,
        )
        return f"data: {chunk.model_dump_json()}\n\n"

    def _messages(self, output: OmniRequestOutput) -> list[dict[str, Any]]:
        """Fields of the messages, one for each choice."""
        if output.final_output_type == "audio":
            return [{"audio": audio} for audio in self._sounds(output)]
        ((name, parts),) = picture_fields(output).items()
        size = len(parts) // self._question.num_choices
        return [{name: parts[i * size : (i + 1) * size]} for i in range(self._question.num_choices)]

    def _sounds(self, output: OmniRequestOutput) -> list[dict[str, Any]]:
        """One for each clip; `[clips, channels, samples]`."""
        assert output.sample_rate is not None
        return [
            {
                "id": f"audio-{self.id}-{i}",
                "data": to_base64(encode_audio(clip.numpy(), self._question.audio_format, output.sample_rate)),
                "expires_at": int(time.time()),  # The server keeps nothing that a later turn could name.
                "transcript": "",
            }
            for i, clip in enumerate(output.multimodal_output["audio"])
        ]


def read_last_message(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The prompt of a diffusion model, and the addresses of its pictures.

    Raises:
        VLLMValidationError: There is something that it would not look at.
    """
    if any(_field(message, "role") in ("system", "developer") for message in messages):
        raise _refusal("a diffusion model takes no system message: say all in the user's last one")
    if not messages or _field(messages[-1], "role") != "user":
        raise _refusal("the last message must be the user's; its text is the prompt")
    content = _field(messages[-1], "content")
    texts: list[Any] = []
    urls: list[Any] = []
    for part in content if isinstance(content, list) else [content]:
        kind = "text" if isinstance(part, str) else _field(part, "type")
        if kind == "text":
            texts.append(part if isinstance(part, str) else _field(part, "text"))
        elif kind == "image_url":
            urls += as_urls(_field(part, "image_url"))
        else:
            raise _refusal(f"a diffusion model takes parts of type text and image_url, not {kind!r}")
    if not all(isinstance(value, str) for value in (*texts, *urls)):
        raise _refusal("a part of type text has a text, and one of type image_url an object with a url")
    return "\n".join(texts), urls


def _field(value: Any, name: str) -> Any:
    """Of what a client has sent, which need not be an object."""
    return value.get(name) if isinstance(value, Mapping) else None


def _refusal(message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="messages")


def _usage(output: OmniRequestOutput) -> UsageInfo:
    used = usage_of(output)
    return UsageInfo(
        prompt_tokens=used.input_tokens, completion_tokens=used.output_tokens, total_tokens=used.total_tokens
    )
