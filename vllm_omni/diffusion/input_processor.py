# SPDX-License-Identifier: Apache-2.0
"""Makes a diffusion stage's request of a prompt and its settings.

Runs in the caller's process and refuses everything that is known to be wrong without the weights.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from vllm_omni.config.dit_config import parse_dit_config
from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.diffusion.input_images import given_media, read_images
from vllm_omni.diffusion.media_inputs import media_arguments, read_media, takes_frames
from vllm_omni.diffusion.modular_info import read_pipeline_info
from vllm_omni.diffusion.pipeline_info import (
    PipelineInfo,
    fewest_steps,
    reads_last_image,
    sound_format,
    takes_alpha,
)
from vllm_omni.diffusion.request_settings import (
    call_arguments,
    check_limits,
    check_text,
    check_values,
    draw_seeds,
    read_settings,
    set_arguments,
)
from vllm_omni.errors import StageConfigError
from vllm_omni.inputs import OmniPrompt
from vllm_omni.media import check_output_format
from vllm_omni.sampling_params import DiffusionRequest, DiffusionSamplingParams, MediaInput

_NOT_FOR_DIFFUSION = ("prompt_token_ids", "prompt_embeds", "mm_processor_kwargs")


class DiffusionInputProcessor:
    """Checks and completes the requests of one diffusion stage."""

    def __init__(self, stage: OmniStageConfig, model: str) -> None:
        """
        Args:
            model: The stage's checkpoint.

        Raises:
            StageConfigError: The checkpoint is not a supported diffusers pipeline, it needs an input that a request
                cannot have, its output type is not the stage's, or it does not take the stage's
                `default_sampling_params`.
        """
        where = stage.label
        self._config = parse_dit_config(stage.dit_engine_args, where)
        self._info = read_pipeline_info(model, self._config)
        self._takes_alpha = self._info.takes_images and takes_alpha(model, self._info.index, self._config.revision)
        self._sound_format = sound_format(model, self._info.index, self._config.revision)
        self._fewest_steps = fewest_steps(model, self._info.index, self._config.revision)
        self._class_name = self._info.pipeline_class.__name__
        self._is_first = not stage.engine_input_source
        self._has_trajectory = stage.final_output and self._config.part != "encoder"
        self.reads_images = self._is_first or stage.runtime.requires_multimodal_data
        self._needs_last_image = reads_last_image(model, self._info.index, self._config.revision)
        if self._is_first:
            _check_inputs(self._info, where)
        _check_output_type(stage, self._info, where)
        try:
            self._defaults, self._set_defaults = read_settings(stage.default_sampling_params, self._info.pipeline_class)
            self._check_settings(self._defaults, self._info.pipeline_class)
        except (ValueError, TypeError) as error:
            raise StageConfigError(f"{where}: default_sampling_params: {error}") from error

    def process(
        self,
        prompt: OmniPrompt,
        params: DiffusionSamplingParams | SamplingParams | Mapping[str, Any] | None,
        lora_request: LoRARequest | None = None,
    ) -> DiffusionRequest:
        """
        Args:
            params: Settings; those that are not set come from the stage's `default_sampling_params`.
            lora_request: The adapter.

        Raises:
            ValueError, TypeError: A value is invalid, or not supported by this pipeline; names it and valid ones.
        """
        if self._is_first:
            _check_prompt(prompt, self._class_name, self._info.takes_prompt)
        settings = self._with_defaults(prompt, params)
        given = given_media(prompt.get("multi_modal_data")) if self.reads_images else {}
        given = {name: value for name, value in given.items() if not (isinstance(value, (list, tuple)) and not value)}
        pipeline_class = self._info.class_for(given)
        self._check_media(given, pipeline_class)
        if "image" in given and self._info.takes_rows(pipeline_class):
            _check_rows(given["image"])
            images = []
        else:
            picture = {"image": given.pop("image", None)}
            images = read_images(picture, self._config.max_pixels, keep_alpha=self._takes_alpha)
        if len(images) > 1 and not self._info.takes_several(pipeline_class):
            raise ValueError(f"{self._class_name} takes one input image for a prompt, not {len(images)}")
        media = read_media(given, pipeline_class, self._config, self._sound_format)
        self._check_numbers(media, pipeline_class)
        if settings.strength is not None and not images and not media and self._info.takes_images:
            raise ValueError("strength needs an input image; give one, or remove strength")
        self._check_settings(settings, pipeline_class)
        if self._is_first:
            text = {"prompt": prompt.get("prompt")} if self._info.takes_prompt else {}
            names = dict.fromkeys([*(["image"] if images else []), *media], True)
            self._info.check_inputs({**text, **names, **set_arguments(settings), **settings.extra_args})
        check_limits(settings, pipeline_class, self._config)
        output_format = check_output_format(self._info.output_type, settings.output_format)
        self._check_adapter(lora_request)
        return DiffusionRequest(
            params=msgspec.structs.replace(settings, output_format=output_format),
            seeds=draw_seeds(settings),
            images=images,
            media=media,
            lora_name=None if lora_request is None else lora_request.lora_name,
            lora_path=None if lora_request is None else lora_request.lora_path,
        )

    def _with_defaults(
        self, prompt: OmniPrompt, params: DiffusionSamplingParams | SamplingParams | Mapping[str, Any] | None
    ) -> DiffusionSamplingParams:
        given, set_fields = read_settings({} if params is None else params, self._info.pipeline_class)
        values = {name: getattr(self._defaults, name) for name in self._set_defaults}
        values |= {name: getattr(given, name) for name in set_fields}
        negative = prompt.get("negative_prompt")
        if negative is not None:
            if not isinstance(negative, str):
                raise TypeError(f"negative_prompt must be a string, not a {type(negative).__name__}")
            if given.negative_prompt not in (None, negative):
                raise ValueError(
                    "negative_prompt is in the prompt and, with another value, in the settings; remove one of them"
                )
            values["negative_prompt"] = negative
        values["extra_args"] = {**self._defaults.extra_args, **given.extra_args}
        return msgspec.structs.replace(DiffusionSamplingParams(), **values)

    def _check_media(self, given: Mapping[str, Any], pipeline_class: type) -> None:
        """Refuses a request without media that the pipeline fails without."""
        if not self.reads_images:
            return
        needed = self._info.needed_media(pipeline_class) if self._is_first else []
        if self._info.needs_images and "image" not in needed:
            needed = ["image", *needed]
        if self._needs_last_image and self._is_first:
            needed = [*needed, "last_image"]
        missing = [name for name in needed if name not in given]
        if missing:
            words = "an input image" if missing == ["image"] else " and ".join(missing)
            example = ", ".join(f"{name!r}: ..." for name in missing)
            raise ValueError(
                f"{pipeline_class.__name__} needs {words}; give multi_modal_data={{{example}}} "
                f"(it takes {', '.join(media_arguments(pipeline_class))})"
            )

    def _check_numbers(self, media: Mapping[str, MediaInput], pipeline_class: type) -> None:
        """diffusers takes a list of pictures for a batch of prompts, and makes an output for each."""
        known = media_arguments(pipeline_class)
        for name, value in media.items():
            pictures = [item for item in value.items if item.kind == "image"]
            is_batch = len(pictures) > 1 or (value.kind == "frames" and value.tensor is not None)
            if is_batch and not takes_frames(name, known[name]) and not self._info.takes_several(pipeline_class, name):
                number = len(pictures) if value.tensor is None else len(value.tensor)
                raise ValueError(f"{pipeline_class.__name__} takes one {name} for a prompt, not {number}")

    def _check_settings(self, params: DiffusionSamplingParams, pipeline_class: type) -> None:
        check_values(params)
        call_arguments(pipeline_class, params)
        steps = params.num_inference_steps
        if steps is not None and steps < self._fewest_steps and "sigmas" not in params.extra_args:
            raise ValueError(f"num_inference_steps {steps}: this model's scheduler needs {self._fewest_steps} or more")
        made = self._info.output_type
        if params.fps is not None and made != "video":
            raise ValueError(f"fps is for videos, and {self._class_name} makes {made}; remove it")
        if params.preview_every and made == "audio":
            raise ValueError("preview_every: audio has no previews; remove it")
        if params.return_trajectory and not self._has_trajectory:
            raise ValueError("return_trajectory: this stage's output is not one of the pipeline's; remove it")
        check_output_format(made, params.output_format)

    def _check_adapter(self, lora_request: LoRARequest | None) -> None:
        if lora_request is None:
            return
        if not isinstance(lora_request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, not {type(lora_request).__name__}")
        if not hasattr(self._info.pipeline_class, "load_lora_weights"):
            raise ValueError(f"{self._class_name} takes no LoRA adapters; remove lora_request")
        path = lora_request.lora_path
        if not os.path.exists(path) and path.count("/") != 1:  # a name on the hub has one
            raise ValueError(
                f"lora_request: {path!r} does not exist; give an adapter's file or folder, or its hub name"
            )


def _check_inputs(info: PipelineInfo, where: str) -> None:
    """Checks the inputs of a first stage; a later one gets some from others (`StageInput.additional_information`)."""
    if info.missing_inputs:
        raise StageConfigError(
            f"{where}: {info.pipeline_class.__name__} needs {' and '.join(info.missing_inputs)}, which other pipelines "
            "make, and a request has only a prompt and media; use a pipeline without it"
        )


def _check_rows(image: Any) -> None:
    rows = [row for row in image if isinstance(row, (list, tuple))] if isinstance(image, (list, tuple)) else []
    is_grid = bool(rows) and len(rows) == len(image) and len({len(row) for row in rows}) == 1
    if not is_grid or all(place is not None for place in rows[-1]):
        raise ValueError(
            "image must be rows of as many images each, with None in the last one for what is to be made: "
            "[[photo, its drawing], [another photo, None]]"
        )


def _check_output_type(stage: OmniStageConfig, info: PipelineInfo, where: str) -> None:
    if stage.final_output and stage.final_output_type != info.output_type:
        raise StageConfigError(
            f"{where}: final_output_type {stage.final_output_type!r}, but {info.pipeline_class.__name__} makes "
            f"{info.output_type!r}; set that"
        )


def _check_prompt(prompt: OmniPrompt, class_name: str, takes_prompt: bool) -> None:
    """A diffusion stage without sources takes text, and media."""
    for key in _NOT_FOR_DIFFUSION:
        if prompt.get(key) is not None:
            raise ValueError(f"a diffusion stage takes a prompt's text, not {key}; give 'prompt'")
    text = prompt.get("prompt")
    if takes_prompt:
        if not isinstance(text, str):
            raise TypeError(f"prompt must be a string, not {'missing' if text is None else f'a {type(text).__name__}'}")
        if not text.strip():
            raise ValueError("prompt is empty; describe the output")
        check_text(text, "prompt")
    elif text:
        raise ValueError(f"{class_name} takes no prompt; leave it out")
    information = prompt.get("additional_information") or {}
    if not isinstance(information, Mapping):
        raise TypeError(f"additional_information must be a dict, not a {type(information).__name__}")
    for key, value in information.items():
        if isinstance(value, torch.Tensor):
            raise ValueError(f"additional_information: {key!r} is a tensor, which a diffusion stage does not take")
