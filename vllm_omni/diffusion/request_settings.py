# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a request, and refuses those that no pipeline could make sense of.

It knows the settings and the stage's limits, and of the pipeline only its call's signature. Sizes that a pipeline
cannot make are refused where it is loaded.
"""

import inspect
import math
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.utils import convert, nearest, split_error
from vllm_omni.diffusion.pipeline_info import call_parameters
from vllm_omni.sampling_params import DiffusionSamplingParams

_LARGEST_SEED = 2**63 - 1
_AT_LEAST = {
    "height": 1, "width": 1, "num_inference_steps": 1, "guidance_scale": 0, "true_cfg_scale": 0,
    "num_outputs_per_prompt": 1, "num_frames": 1, "output_quality": 1, "preview_every": 0, "lora_scale": -100,
}  # fmt: skip
_ABOVE_ZERO = ("strength", "fps")
# Guidance and adapters: far above what anybody uses, and far below what overflows in half precision.
_AT_MOST = {"strength": 1, "output_quality": 100, "guidance_scale": 1000, "true_cfg_scale": 1000, "lora_scale": 100}


def read_settings(
    given: DiffusionSamplingParams | SamplingParams | Mapping[str, Any], pipeline_class: type
) -> tuple[DiffusionSamplingParams, set[str]]:
    """The settings as they were given, and the names of those that say something.

    Of a dict these are the keys whose values are not None; of `DiffusionSamplingParams` the ones that differ from its
    defaults.

    Raises:
        ValueError, TypeError: A name is unknown, or a value has the wrong type.
    """
    if isinstance(given, DiffusionSamplingParams):
        default = DiffusionSamplingParams()
        values = msgspec.structs.asdict(given)
        said = {name for name, value in values.items() if value != getattr(default, name)}
    elif isinstance(given, Mapping):
        values = {name: value for name, value in given.items() if value is not None}
        _check_names(values, pipeline_class)
        said = set(values)
    else:
        raise TypeError(
            f"a diffusion stage takes DiffusionSamplingParams, or a dict of their fields, not {type(given).__name__}"
        )
    try:
        return convert(values, DiffusionSamplingParams), said
    except msgspec.ValidationError as error:
        problem, name = split_error(error)
        raise TypeError(f"{name or 'sampling parameters'}: {problem}") from error


def check_values(params: DiffusionSamplingParams) -> None:
    """
    Raises:
        ValueError: A value is out of the range that makes sense for any pipeline.
    """
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} {value}: must be a finite number")
    for name, smallest in _AT_LEAST.items():
        value = getattr(params, name)
        if value is not None and value < smallest:
            raise ValueError(f"{name} {value}: must be {smallest} or more")
    for name in _ABOVE_ZERO:
        value = getattr(params, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} {value}: must be above 0")
    for name, largest in _AT_MOST.items():
        value = getattr(params, name)
        if value is not None and value > largest:
            raise ValueError(f"{name} {value}: must be {largest} or less")
    check_text(params.negative_prompt or "", "negative_prompt")
    _check_extra_args(params.extra_args)


def check_limits(params: DiffusionSamplingParams, pipeline_class: type, config: DiTConfig) -> None:
    """
    Raises:
        ValueError: The request asks for more than the stage's configuration allows, or says nothing and the pipeline's
            own default is more than that.
    """
    _check_limit("num_inference_steps", _effective("num_inference_steps", params, pipeline_class), config, "max_steps")
    _check_limit("num_frames", _effective("num_frames", params, pipeline_class), config, "max_frames")
    _check_limit("num_outputs_per_prompt", (params.num_outputs_per_prompt, ""), config, "max_outputs")
    (height, _), (width, note) = (_effective(name, params, pipeline_class) for name in ("height", "width"))
    pixels = (height or 1) * (width or 1)
    if pixels > config.max_pixels:
        size = " x ".join(str(side) for side in (height, width) if side is not None)
        raise ValueError(
            f"height x width {size}{note}: at least {pixels} pixels; this stage makes at most {config.max_pixels} "
            "(max_pixels)"
        )


def draw_seeds(params: DiffusionSamplingParams) -> list[int]:
    """One seed for each output: those that were asked for, or fresh ones.

    Raises:
        ValueError: There are not as many as outputs, or one is out of range.
    """
    count = params.num_outputs_per_prompt
    if params.seed is None:
        return [secrets.randbits(63) for _ in range(count)]
    seeds = params.seed if isinstance(params.seed, list) else [params.seed + index for index in range(count)]
    if len(seeds) != count:
        raise ValueError(
            f"seed has {len(seeds)} entries and num_outputs_per_prompt is {count}; give one seed for each output, or a "
            "single one, from which the others follow"
        )
    for seed in seeds:
        if not 0 <= seed <= _LARGEST_SEED:
            raise ValueError(f"seed {seed}: must be 0 to {_LARGEST_SEED}; leave it out for a fresh one")
    return seeds


def check_text(text: str, name: str) -> None:
    """
    Raises:
        ValueError: It has half of a surrogate pair, and so no encoding.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no valid text: half a character at position {error.start}") from error


def _check_names(values: Mapping[str, Any], pipeline_class: type) -> None:
    known = DiffusionSamplingParams.__struct_fields__
    for name in values:
        if name in known:
            continue
        if name in call_parameters(pipeline_class):
            raise ValueError(f"unknown sampling parameter {name!r}; give it in extra_args: {{{name!r}: ...}}")
        raise ValueError(f"unknown sampling parameter {name!r}{nearest(str(name), known)} (known: {', '.join(known)})")


def _check_extra_args(extra_args: dict[str, Any]) -> None:
    for name, value in extra_args.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(
                f"extra_args: {name!r} is not plain numbers, texts and lists or dicts of them: {error}"
            ) from error


def _effective(name: str, params: DiffusionSamplingParams, pipeline_class: type) -> tuple[int | None, str]:
    """What the pipeline will use, as far as its signature shows it, and a note where that is its own choice."""
    value = getattr(params, name)
    if value is not None:
        return value, ""
    parameter = call_parameters(pipeline_class).get(name)
    default = inspect.Parameter.empty if parameter is None else parameter.default
    return (default, " (the pipeline's own default)") if type(default) is int else (None, "")


def _check_limit(name: str, effective: tuple[int | None, str], config: DiTConfig, limit: str) -> None:
    value, note = effective
    if value is not None and value > getattr(config, limit):
        raise ValueError(f"{name} {value}{note}: this stage allows at most {getattr(config, limit)} ({limit})")


# Settings that are arguments of diffusers' pipelines, under the same names.
_ARGUMENTS = (
    "negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", "true_cfg_scale", "strength",
    "num_frames",
)  # fmt: skip
# What pipelines call the setting `fps`. Those without it make frames, and only the file has a speed.
_FPS = ("fps", "frame_rate")
# Arguments that the stage itself gives, and where their value comes from.
_GIVEN = {
    "prompt": "the prompt", "image": "multi_modal_data", "generator": "seed", "output_type": "output_format",
    "num_images_per_prompt": "num_outputs_per_prompt", "num_videos_per_prompt": "num_outputs_per_prompt",
    "num_waveforms_per_prompt": "num_outputs_per_prompt", "return_dict": "", "callback": "", "callback_steps": "",
    "callback_on_step_end": "", "callback_on_step_end_tensor_inputs": "",
} | {name: "fps" for name in _FPS}  # fmt: skip


def call_arguments(pipeline_class: type, params: DiffusionSamplingParams) -> dict[str, Any]:
    """Keyword arguments of `pipeline_class.__call__` for all settings that are not None, `extra_args` among them.

    Prompt, images, generator, output type, callbacks and the number of outputs are not among them.

    Raises:
        ValueError: The pipeline does not take a setting; names it, and what it does take.
    """
    known = call_parameters(pipeline_class)
    settings = {name: getattr(params, name) for name in _ARGUMENTS}
    arguments = {name: value for name, value in settings.items() if value is not None}
    for name in params.extra_args:
        _check_extra(name)
    arguments |= params.extra_args
    for name in arguments:
        if name not in known:
            raise ValueError(_refusal(pipeline_class, name, list(known)))
    if params.fps is not None:
        arguments |= {name: params.fps for name in _FPS if name in known}
    return arguments


def default_fps(pipeline_class: type) -> float | None:
    """The frames per second that a pipeline makes a video for unless it is told; None where it does not say."""
    known = call_parameters(pipeline_class)
    defaults = (known[name].default for name in _FPS if name in known)
    return next((float(default) for default in defaults if isinstance(default, (int, float))), None)


def _check_extra(name: str) -> None:
    if name in _ARGUMENTS:
        raise ValueError(f"extra_args: {name!r} is a setting of its own; give it beside extra_args")
    source = _GIVEN.get(name)
    if source is not None:
        where = f"; its value comes from {source}" if source else ""
        raise ValueError(f"extra_args: {name!r} is given by the stage itself{where}; leave it out")


def _refusal(pipeline_class: type, name: str, known: list[str]) -> str:
    settings = [known_name for known_name in known if known_name in _ARGUMENTS]
    extra = [known_name for known_name in known if known_name not in _ARGUMENTS and known_name not in _GIVEN]
    return (
        f"{pipeline_class.__name__} does not take {name!r}{nearest(name, known)} (it takes {', '.join(settings)}; in "
        f"extra_args {', '.join(extra)})"
    )
