# SPDX-License-Identifier: Apache-2.0
"""Endpoints for one type of output: the steps that all have, and the settings of those for diffusion models."""

from __future__ import annotations

import dataclasses
import inspect
import types
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, ClassVar, Union, get_args, get_origin

from fastapi import FastAPI, Request, Response
from PIL import Image
from starlette.datastructures import State
from starlette.requests import HTTPConnection
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.tracing import extract_trace_headers
from vllm.utils import random_uuid

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.config.utils import nearest
from vllm_omni.diffusion.media_inputs import (
    call_parameters,
    dataclass_in,
    media_arguments,
    names_media,
    takes_frames,
    takes_images,
    takes_sound,
)
from vllm_omni.diffusion.pipeline_info import PipelineInfo
from vllm_omni.diffusion.request_settings import default_fps
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.media_request import MediaFetcher, as_media_urls, is_image
from vllm_omni.entrypoints.openai.sse import Line, sse_response
from vllm_omni.entrypoints.request_builder import StageSamplingParams
from vllm_omni.events import CompletedEvent, OmniEvent
from vllm_omni.inputs import OmniPrompt
from vllm_omni.media import DEFAULT_FPS

MODEL_ALIASES: dict[str, Collection[str]] = {
    "speech": ("tts-1", "tts-1-hd", "gpt-4o-mini-tts"),
    "transcription": ("whisper-1", "gpt-transcribe", "gpt-4o-transcribe", "gpt-4o-mini-transcribe"),
    "image": ("dall-e-2", "dall-e-3", "gpt-image-1", "gpt-image-2.5-flare"),
}
"""Names of models that many clients do not let a person change, by kind of request."""


class MediaEndpoint:
    """The handler of requests for one type of output.

    A request goes through the same steps at each of them: `check_model`; its settings, which each endpoint reads in its
    own way; `media`, which also admits it; `start`; and its events are rendered, by `sse` if they are a stream.

    Attributes:
        kind: Of the ids of requests, and of `MODEL_ALIASES`.
        client: The pipeline.
        stage: The final stage that makes the output.
        media: Fetches the media of requests.
    """

    kind: ClassVar[str]

    def __init__(self, state: State, client: OmniEngineClient, stage: OmniStageConfig, args: Namespace) -> None:
        """
        Args:
            state: Of the application; has the names that the pipeline and its adapters are served under.
            args: Of `vllm serve`.
        """
        self.client = client
        self.stage = stage
        self.media = MediaFetcher(client, args)
        self._models = state.openai_serving_models
        self._aliases = model_aliases(args, self.kind)
        self._keep_alive_s = float(args.sse_keep_alive_interval)

    @property
    def model_names(self) -> list[str]:
        """What requests may name as their model, the model's own names first."""
        return [path.name for path in self._models.base_model_paths]

    def check_model(self, name: str | None) -> None:
        """Refuses a request that names another model, as the function below."""
        check_model(name, self.model_names, self._aliases)

    def start(
        self,
        prompt: OmniPrompt,
        params: Sequence[StageSamplingParams],
        raw_request: HTTPConnection | None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[OmniEvent, None]:
        """The events of one request to the pipeline, see `OmniEngineClient.run`. Its id is a new one by default."""
        headers = None if raw_request is None else extract_trace_headers(raw_request.headers)
        request_id = request_id or new_id(self.kind, raw_request)
        return self.client.run(prompt, params, request_id, trace_headers=headers, **options)

    def sse(self, lines: AsyncGenerator[Line, None], headers: Mapping[str, str] | None = None) -> Response:
        """The answer that streams lines, see `sse_response`."""
        return sse_response(lines, self._keep_alive_s, headers)


class DiffusionEndpoint(MediaEndpoint):
    """An endpoint whose requests have the settings of a diffusion model.

    Attributes:
        info: The diffusers pipeline that the stage runs; None for another engine, whose settings are the fields that
            the model's prompt processor reads.
    """

    def __init__(self, state: State, client: OmniEngineClient, stage: OmniStageConfig, args: Namespace) -> None:
        super().__init__(state, client, stage, args)
        self.info: PipelineInfo | None = stage.kind.load_pipeline_info(args.model)

    @property
    def model_names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return [*super().model_names, *self._models.lora_requests]

    @property
    def makes(self) -> str:
        """`image`, `video`, `audio`."""
        return self.stage.final_output_type or ""

    def expected(self, name: str, settings: Mapping[str, Any]) -> Any:
        """The value of a setting: the request's, the stage's default, else the diffusers pipeline's.

        None if the pipeline chooses it while it runs.
        """
        for values in (settings, self.stage.default_sampling_params):
            if values.get(name) is not None:
                return values[name]
        parameter = None if self.info is None else call_parameters(self.info.pipeline_class).get(name)
        return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default

    def expected_size(self, settings: Mapping[str, Any]) -> str | None:
        """`WIDTHxHEIGHT`, if it is known before the pipeline runs."""
        width, height = (self.expected(name, settings) for name in ("width", "height"))
        return f"{width}x{height}" if width and height else None

    def expected_fps(self, settings: Mapping[str, Any]) -> float:
        own = None if self.info is None else default_fps(self.info.pipeline_class)
        return self.expected("fps", settings) or own or DEFAULT_FPS

    def with_adapter(self, settings: Mapping[str, Any], model: str | None) -> dict[str, Any]:
        """The settings with the name of the request's LoRA adapter as `lora`, if it has one.

        Args:
            settings: May have a `lora`.
            model: The request's; may be the name of an adapter.

        Raises:
            VLLMValidationError: There is no such adapter, the request names two, or has a scale without an adapter.
        """
        known = self._models.lora_requests
        named = {**({"lora": model} if model in known else {}), **settings}
        adapter = named.get("lora")
        if adapter is not None and adapter not in known:
            names = ", ".join(known) or "none"
            raise VLLMValidationError(
                f"there is no adapter {adapter!r}{nearest(adapter, known)} (this server has {names})", parameter="lora"
            )
        if model in known and adapter != model:
            raise VLLMValidationError(f"lora and model name two adapters, {adapter} and {model}", parameter="lora")
        if "lora_scale" in named and (adapter is None or not self.client.config.adapter_stages):
            raise VLLMValidationError(
                "lora_scale is for an adapter of the diffusion model, and the request names none",
                parameter="lora_scale",
            )
        return named

    def check_prompt(self, prompt: str) -> None:
        """
        Raises:
            VLLMValidationError: There is none, and the model needs one.
        """
        if not prompt and (self.info is None or self.info.takes_prompt):
            raise VLLMValidationError("prompt is missing", parameter="prompt")

    async def read_inputs(
        self,
        urls: Mapping[str, Sequence[str | Mapping[str, Any]]],
        has_images: bool = False,
        parameter: str | None = None,
    ) -> dict[str, Any]:
        """The media that a request has beside its images, fetched: images, videos and sounds by the pipeline's names.

        Args:
            urls: Addresses and data URIs; several for a list of images. Of an argument that is a dataclass, its fields,
                with addresses of the media among them.
            has_images: The request has images, too.
            parameter: The request's field, for errors; None: the name.

        Raises:
            VLLMClientError: The pipeline does not take one, or it cannot be read.
        """
        if not urls:
            return {}
        if self.info is None:
            raise VLLMValidationError("this model takes no inputs; remove them", parameter="inputs")
        try:
            known = media_arguments(self.info.class_for([*(["image"] if has_images else []), *urls]))
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=parameter or next(iter(urls))) from error
        return {
            name: await self._read_input(name, known[name], addresses, parameter or name)
            for name, addresses in urls.items()
        }

    async def _read_input(
        self, name: str, annotation: Any, given: Sequence[str | Mapping[str, Any]], parameter: str
    ) -> Any:
        declared = dataclass_in(annotation)
        if declared is not None:
            return [await self._read_fields(name, declared, each, parameter) for each in given]
        urls = [each for each in given if isinstance(each, str)]
        if len(urls) != len(given):
            raise VLLMValidationError(f"{name} must be a data URI or an address, no object", parameter=parameter)
        if takes_sound(name, annotation):
            if len(urls) != 1:
                raise VLLMValidationError(f"{name} is one sound, not {len(urls)}", parameter=parameter)
            return await self.media.sound(urls[0], parameter)
        if len(urls) == 1 and takes_frames(name, annotation) and not (_takes_one(annotation) and is_image(urls[0])):
            return await self.media.video(urls[0], parameter)
        if not takes_images(name, annotation):
            raise VLLMValidationError(
                f"{name} is a tensor for this model's pipeline, which HTTP requests cannot have; OmniLLM takes it",
                parameter=parameter,
            )
        images = await self.media.images(urls, parameter)
        return images[0] if len(images) == 1 else images

    async def _read_fields(
        self, name: str, declared: type[Any], given: str | Mapping[str, Any], parameter: str
    ) -> dict[str, Any]:
        """The fields of a dataclass of the pipeline's, with its media fetched; the stage checks their names."""
        fields = {field.name: field.type for field in dataclasses.fields(declared)}
        if isinstance(given, str):
            raise VLLMValidationError(f"{name} is an object with {', '.join(fields)}", parameter=parameter)
        read = dict(given)
        for key, value in given.items():
            where = f"{parameter}.{key}"
            if key in fields and names_media(fields[key]) and value is not None:
                urls = as_media_urls(value)
                if not all(isinstance(url, str) for url in urls):
                    raise VLLMValidationError(f"{where} must be a data URI or an address", parameter=where)
                read[key] = await self._read_input(key, fields[key], urls, where)
        return read

    def generate(
        self,
        prompt: str,
        settings: Mapping[str, Any],
        images: Sequence[Image.Image],
        raw_request: Request | None,
        request_id: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[OmniEvent, None]:
        """Starts a request with these settings, see `start`.

        Args:
            settings: Fields of `DiffusionSamplingParams`, and `lora`, the name of an adapter.
            images: The model's input images.
            inputs: Further media, see `read_inputs`.
            options: Further arguments of `OmniEngineClient.run`.

        Raises:
            VLLMValidationError: There are settings that neither the stage nor the model's prompt takes.
        """
        own = {name: value for name, value in settings.items() if name != "lora"}
        omni_prompt = OmniPrompt(prompt=prompt, modalities=[self.makes])
        if own and self.info is None:
            omni_prompt["additional_information"] = self._prompt_fields(own)
            own = {}
        if images or inputs:
            omni_prompt["multi_modal_data"] = {**({"image": list(images)} if images else {}), **(inputs or {})}
        adapter = settings.get("lora")
        return self.start(
            omni_prompt,
            [own if stage is self.stage and own else None for stage in self.client.config.stage_args],
            raw_request,
            request_id,
            lora_request=None if adapter is None else self._models.lora_requests[adapter],
            **options,
        )

    def _prompt_fields(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, as fields of the prompt.

        Raises:
            VLLMValidationError: The model's prompt does not have one of them.
        """
        known = self.client.prompt_fields
        given = {name: value for name, value in settings.items() if (name, value) != ("num_outputs_per_prompt", 1)}
        for name in given:
            if name not in known:
                have = f"have no {name}; they have {', '.join(sorted(known))}" if known else "have no settings"
                raise VLLMValidationError(f"this model's {self.makes}s {have}", parameter=name)
        return given


def _takes_one(annotation: Any) -> bool:
    """Whether an argument that takes frames may also be a single picture."""
    return get_origin(annotation) in (Union, types.UnionType) and Image.Image in get_args(annotation)


def final_stage(config: PipelineConfig, output_type: str) -> OmniStageConfig | None:
    """The final stage that returns outputs of a type; None if there is none."""
    stages = (stage for stage in config.stage_args if stage.final_output and stage.final_output_type == output_type)
    return next(stages, None)


def get_handler(raw_request: Request, output_type: str) -> Any:
    """The application's handler of requests for outputs of a type.

    Raises:
        VLLMValidationError: The model does not make them.
    """
    state = raw_request.app.state
    if output_type not in state.omni_handlers:
        outputs = ", ".join(state.engine_client.config.output_types)
        raise VLLMValidationError(f"this model cannot output {output_type}; it outputs {outputs}", parameter="model")
    return state.omni_handlers[output_type]


def closing_store(output_type: str) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """The lifespan of a router whose handler keeps files in a `store`, which is closed at the end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        if handler := app.state.omni_handlers.get(output_type):
            await handler.store.close()

    return lifespan


def served_names(state: State) -> list[str]:
    """The names that the application's model is served under."""
    return [path.name for path in state.openai_serving_models.base_model_paths]


def model_aliases(args: Namespace, kind: str) -> Collection[str]:
    """OpenAI's names that mean the served model in requests of one kind, see `MODEL_ALIASES`."""
    return MODEL_ALIASES.get(kind, ()) if args.model_aliases else ()


def check_model(name: str | None, served: Sequence[str], aliases: Collection[str] = ()) -> None:
    """
    Args:
        served: The names of models, and of adapters where a request may name one.
        aliases: Further names of the first of them.

    Raises:
        VLLMNotFoundError: The request names another model than those that are served.
    """
    if name and name not in served and name not in aliases:
        raise VLLMNotFoundError(f"The model `{name}` does not exist; this server has {', '.join(served)}.")


def new_id(prefix: str, raw_request: HTTPConnection | None = None) -> str:
    """An id for a request: the client's own `X-Request-Id`, else a random one."""
    own = None if raw_request is None else raw_request.headers.get("X-Request-Id")
    return f"{prefix}-{own or random_uuid()}"


async def completed_event(events: AsyncGenerator[OmniEvent, None]) -> CompletedEvent:
    """The event with all outputs, when they are complete."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, CompletedEvent):
                return event
    raise AssertionError("the last event of a request is a CompletedEvent")
