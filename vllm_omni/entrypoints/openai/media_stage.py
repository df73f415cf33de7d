# SPDX-License-Identifier: Apache-2.0
"""The stage of a pipeline that makes images, videos or sound, and how it is asked.

Knows how settings reach it and what it does where they say nothing. Of HTTP it knows that a request has headers.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from PIL import Image
from starlette.datastructures import State
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.tracing import extract_trace_headers
from vllm.utils import random_uuid

from vllm_omni.config.dit_config import parse_dit_config
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.config.utils import nearest
from vllm_omni.diffusion.call_arguments import default_fps
from vllm_omni.diffusion.pipeline_info import PipelineInfo, call_parameters
from vllm_omni.events import CompletedEvent, OmniEvent
from vllm_omni.inputs import OmniPrompt
from vllm_omni.media import DEFAULT_FPS
from vllm_omni.outputs import OmniRequestOutput

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
    from vllm_omni.entrypoints.openai.models import DiffusionModels

Part = TypeVar("Part")


@dataclass(frozen=True)
class MediaStage:
    """
    Attributes:
        config: The pipeline.
        stage: The final stage that makes it.
        info: The diffusers pipeline that it runs; None where it runs something else, which has no settings.
    """

    config: PipelineConfig
    stage: OmniStageConfig
    info: PipelineInfo | None

    @classmethod
    def find(cls, config: PipelineConfig, output_type: str, model: str) -> MediaStage | None:
        """The stage that gives callers outputs of this type; None if there is none.

        Args:
            model: The pipeline's checkpoint.
        """
        for stage in config.stage_args:
            if stage.final_output and stage.final_output_type == output_type:
                return cls(config, stage, _load_info(stage, model))
        return None

    @property
    def makes(self) -> str:
        """`image`, `video`, `audio`."""
        return self.stage.final_output_type or ""

    def params_list(self, settings: Mapping[str, Any]) -> list[dict[str, Any] | None]:
        """Sampling parameters of all stages, where only this one is told something.

        Raises:
            VLLMValidationError: There are settings, and it has none.
        """
        if settings and self.info is None:
            raise VLLMValidationError(f"this model's {self.makes}s have no settings", parameter=next(iter(settings)))
        return [dict(settings) if stage is self.stage and settings else None for stage in self.config.stage_args]

    def expected(self, name: str, settings: Mapping[str, Any]) -> Any:
        """What the stage takes for a setting: the request's value, its own default, else the diffusers pipeline's.

        None where only the pipeline knows, while it runs.
        """
        for values in (settings, self.stage.default_sampling_params):
            if values.get(name) is not None:
                return values[name]
        parameter = None if self.info is None else call_parameters(self.info.pipeline_class).get(name)
        return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default

    def expected_size(self, settings: Mapping[str, Any]) -> str | None:
        """`WIDTHxHEIGHT`, as far as it is known before."""
        width, height = (self.expected(name, settings) for name in ("width", "height"))
        return f"{width}x{height}" if width and height else None

    def expected_fps(self, settings: Mapping[str, Any]) -> float:
        own = None if self.info is None else default_fps(self.info.pipeline_class)
        return self.expected("fps", settings) or own or DEFAULT_FPS


def _load_info(stage: OmniStageConfig, model: str) -> PipelineInfo | None:
    if stage.kind != "DiT":
        return None
    return PipelineInfo.load(stage.checkpoint(model), parse_dit_config(stage.dit_engine_args, stage.name))


def missing_media(config: PipelineConfig, output_type: str) -> VLLMValidationError:
    """For who asks a model for what it cannot make: says what it can."""
    return VLLMValidationError(
        f"this model makes no {output_type}s; it makes {', '.join(config.output_types)}", parameter="model"
    )


class MediaMaker:
    """Asks the pipeline for what one of its stages makes."""

    def __init__(
        self, client: OmniEngineClient, models: OpenAIServingModels | DiffusionModels, stage: MediaStage
    ) -> None:
        """
        Args:
            models: The names that the pipeline and its adapters are served under.
        """
        self.client = client
        self.stage = stage
        self.model_name = models.base_model_paths[0].name
        self._models = models

    def check_model(self, name: str | None) -> None:
        """
        Raises:
            VLLMNotFoundError: Another model is asked for than is served.
        """
        check_model(name, [*(path.name for path in self._models.base_model_paths), *self._models.lora_requests])

    def with_adapter(self, settings: Mapping[str, Any], model: str | None) -> dict[str, Any]:
        """The settings with the name of the request's LoRA adapter as `lora`, if it has one.

        Args:
            settings: May have a `lora`.
            model: As the request has it; may be the name of an adapter, too.

        Raises:
            VLLMValidationError: There is no such adapter, the request names two, or what it says of it means nothing.
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
        if "lora_scale" in named and (adapter is None or not self.stage.config.adapter_stages):
            raise VLLMValidationError(
                "lora_scale is for an adapter of the diffusion model, and the request names none",
                parameter="lora_scale",
            )
        return named

    def events(
        self,
        prompt: str,
        settings: Mapping[str, Any],
        images: Sequence[Image.Image],
        raw_request: Request | None,
        *,
        request_id: str,
        stream: bool,
        **options: Any,
    ) -> AsyncGenerator[OmniEvent, None]:
        """The events of one request, see `OmniEngineClient.run`.

        Args:
            settings: Fields of `DiffusionSamplingParams`, and the adapter's name as `lora`, if there is one.
            images: What the model is to look at.
            options: Further arguments of `OmniEngineClient.run`.
        """
        omni_prompt = OmniPrompt(prompt=prompt, modalities=[self.stage.makes])
        if images:
            omni_prompt["multi_modal_data"] = {"image": list(images)}
        adapter = settings.get("lora")
        return self.client.run(
            omni_prompt,
            self.stage.params_list({name: value for name, value in settings.items() if name != "lora"}),
            request_id,
            stream=stream,
            lora_request=None if adapter is None else self._models.lora_requests[adapter],
            trace_headers=None if raw_request is None else extract_trace_headers(raw_request.headers),
            **options,
        )


def served_names(state: State) -> list[str]:
    """The names that the application's model is served under."""
    return [path.name for path in state.openai_serving_models.base_model_paths]


def check_model(name: str | None, served: Sequence[str]) -> None:
    """
    Raises:
        VLLMNotFoundError: Another model is asked for than is served.
    """
    if name and name not in served:
        raise VLLMNotFoundError(f"The model `{name}` does not exist; this server has {', '.join(served)}.")


def new_id(prefix: str, raw_request: Request | None = None) -> str:
    """An id for a request: its client's own, if it has sent one, else a random one."""
    own = None if raw_request is None else raw_request.headers.get("X-Request-Id")
    return f"{prefix}-{own or random_uuid()}"


async def begun(parts: AsyncGenerator[Part, None]) -> AsyncGenerator[Part, None]:
    """The same parts, when there is a first: what fails before has an HTTP status."""
    first = await anext(parts)

    async def all_parts() -> AsyncGenerator[Part, None]:
        async with aclosing(parts):
            yield first
            async for part in parts:
                yield part

    return all_parts()


async def completed(events: AsyncGenerator[OmniEvent, None]) -> OmniRequestOutput:
    """The output, when it is complete."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, CompletedEvent):
                return event.outputs[0]
    raise AssertionError("the last event of a request tells that it is complete")
