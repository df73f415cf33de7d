# SPDX-License-Identifier: Apache-2.0
"""The settings of a request: read, checked, and converted to the keyword arguments of the pipeline's call.

It knows the settings and the stage's limits, and of the pipeline only its call's signature. The runner, which has the
loaded pipeline, refuses sizes that the pipeline cannot make.
"""

import inspect
import math
import operator
import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.utils import convert, nearest, split_error
from vllm_omni.diffusion.media_inputs import call_parameters
from vllm_omni.sampling_params import DiffusionSamplingParams

_LARGEST_SEED = 2**63 - 1
_AT_LEAST = {
    "height": 1, "width": 1, "num_inference_steps": 1, "guidance_scale": 0, "true_cfg_scale": 0,
    "num_outputs_per_prompt": 1, "num_frames": 1, "output_quality": 1, "preview_every": 0, "lora_scale": -100,
}  # fmt: skip
_ABOVE = {"strength": 0, "fps": 0}
# Guidance and adapters: far above useful values, and far below an overflow in half precision.
_AT_MOST = {"strength": 1, "output_quality": 100, "guidance_scale": 1000, "true_cfg_scale": 1000, "lora_scale": 100}

_LIMITS = {
    "num_inference_steps": "max_steps", "num_frames": "max_frames", "num_outputs_per_prompt": "max_outputs",
    "layers": "max_outputs",  # an argument of some pipelines: images of one output
}  # fmt: skip


def read_settings(
    given: DiffusionSamplingParams | SamplingParams | Mapping[str, Any], pipeline_class: type
) -> tuple[DiffusionSamplingParams, set[str]]:
    """The settings, and the names of the fields that are set.

    Those are the keys of a dict whose values are not None, or the fields of `DiffusionSamplingParams` that differ from
    their defaults.

    Raises:
        ValueError, TypeError: A name is unknown, or a value has the wrong type.
    """
    if isinstance(given, DiffusionSamplingParams):
        default = DiffusionSamplingParams()
        values = msgspec.structs.asdict(given)
        set_fields = {name for name, value in values.items() if value != getattr(default, name)}
    elif isinstance(given, Mapping):
        values = {name: value for name, value in given.items() if value is not None}
        _check_names(values, pipeline_class)
        set_fields = set(values)
    else:
        raise TypeError(
            f"a diffusion stage takes DiffusionSamplingParams, or a dict of their fields, not {type(given).__name__}"
        )
    try:
        return convert(values, DiffusionSamplingParams), set_fields
    except msgspec.ValidationError as error:
        problem, name = split_error(error)
        raise TypeError(f"{name or 'sampling parameters'}: {problem}") from error


def check_values(params: DiffusionSamplingParams) -> None:
    """
    Raises:
        ValueError: A value is outside the range of every pipeline.
    """
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} {value}: must be a finite number")
    for bounds, is_within, words in (
        (_AT_LEAST, operator.ge, "{} or more"), (_ABOVE, operator.gt, "above {}"), (_AT_MOST, operator.le, "{} or less")
    ):  # fmt: skip
        for name, bound in bounds.items():
            value = getattr(params, name)
            if value is not None and not is_within(value, bound):
                raise ValueError(f"{name} {value}: must be {words.format(bound)}")
    check_text(params.negative_prompt or "", "negative_prompt")
    _check_extra_args(params.extra_args)


def check_limits(params: DiffusionSamplingParams, pipeline_class: type, config: DiTConfig) -> None:
    """
    Raises:
        ValueError: The request's value, or the pipeline's default, exceeds a limit of the stage's configuration.
    """
    for name, limit in _LIMITS.items():
        value, note = _effective(name, params, pipeline_class)
        if isinstance(value, int) and value > getattr(config, limit):
            raise ValueError(f"{name} {value}{note}: this stage allows at most {getattr(config, limit)} ({limit})")
    for name, given in params.extra_args.items():
        _check_cost(name, given, pipeline_class, config)
    (height, _), (width, note) = (_effective(name, params, pipeline_class) for name in ("height", "width"))
    pixels = (height or 1) * (width or 1)
    if pixels > config.max_pixels:
        size = " x ".join(str(side) for side in (height, width) if side is not None)
        raise ValueError(
            f"height x width {size}{note}: at least {pixels} pixels; this stage makes at most {config.max_pixels} "
            "(max_pixels)"
        )


# What further arguments cost, by their names in diffusers' pipelines, and the setting that limits it.
_COSTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"steps($|_)"), "max_steps"),
    (re.compile(r"frames|video_length|_chunk_size$"), "max_frames"),
    (re.compile(r"^layers$|ensemble_size|^num_.*_per_|batch_size"), "max_outputs"),
    (re.compile(r"duration|seconds|_in_s$"), "max_seconds"),
    (re.compile(r"resolution$|(^|_)(height|width)|image_size$"), "max_pixels"),
    (re.compile(r"sequence_length$|_tokens$"), ""),
)
_MOST_TOKENS = 1024
"""Of a prompt; more where the pipeline's own default is."""


def _check_cost(name: str, given: Any, pipeline_class: type, config: DiTConfig) -> None:
    if isinstance(given, list):
        of_list = "max_steps" if name in ("sigmas", "timesteps") else "max_frames"
        if len(given) > getattr(config, of_list):
            raise ValueError(
                f"extra_args: {name!r} has {len(given)} values; this stage allows at most {getattr(config, of_list)} "
                f"({of_list})"
            )
    limit = next((limit for pattern, limit in _COSTS if pattern.search(name)), None)
    if limit is None:
        return
    parameter = call_parameters(pipeline_class).get(name)
    own = parameter.default if parameter is not None and type(parameter.default) is int else 0
    most = getattr(config, limit) if limit else max(_MOST_TOKENS, own)
    for number in given if isinstance(given, list) else [given]:
        if type(number) not in (int, float):
            continue
        cost = number * number if limit == "max_pixels" else number
        if not cost <= most:
            words = f"{most}{' pixels' if limit == 'max_pixels' else ''}{f' ({limit})' if limit else ''}"
            raise ValueError(f"extra_args: {name} {number}: this stage allows at most {words}")


def draw_seeds(params: DiffusionSamplingParams) -> list[int]:
    """One seed for each output: the request's, or random ones.

    Raises:
        ValueError: The number of seeds differs from that of outputs, or one is out of range.
    """
    count = params.num_outputs_per_prompt
    if params.seed is None:
        return [secrets.randbits(63) for _ in range(count)]
    seeds = params.seed if isinstance(params.seed, list) else [params.seed + index for index in range(count)]
    if len(seeds) != count:
        raise ValueError(
            f"seed has {len(seeds)} entries and num_outputs_per_prompt is {count}; give one seed for each output, or a "
            "single one for the first"
        )
    for seed in seeds:
        if not 0 <= seed <= _LARGEST_SEED:
            raise ValueError(f"seed {seed}: must be 0 to {_LARGEST_SEED}; omit it for a random one")
    return seeds


def check_text(text: str, name: str) -> None:
    """
    Raises:
        ValueError: It has half of a surrogate pair, which has no encoding.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: half a surrogate pair at position {error.start}") from error


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
                f"extra_args: {name!r} must be numbers, strings, and lists or dicts of them ({error}); give media in "
                "multi_modal_data"
            ) from error


def _effective(name: str, params: DiffusionSamplingParams, pipeline_class: type) -> tuple[int | None, str]:
    """The pipeline's value, as far as its signature shows it, and a note where it is a default."""
    value = getattr(params, name, params.extra_args.get(name))
    if value is not None:
        return value, ""
    parameter = call_parameters(pipeline_class).get(name)
    default = inspect.Parameter.empty if parameter is None else parameter.default
    return (default, " (the pipeline's own default)") if type(default) is int else (None, "")


# Settings that are arguments of diffusers' pipelines, under the same names.
_ARGUMENTS = (
    "negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", "true_cfg_scale", "strength",
    "num_frames",
)  # fmt: skip
# Pipelines' names for the setting `fps`. Those without it make frames, and only the file has a rate.
_FPS = ("fps", "frame_rate")
# Arguments that the stage sets, and the source of their values.
_SET_BY_STAGE = {
    "prompt": "the prompt", "image": "multi_modal_data", "generator": "seed", "output_type": "output_format",
    "num_images_per_prompt": "num_outputs_per_prompt", "num_videos_per_prompt": "num_outputs_per_prompt",
    "num_waveforms_per_prompt": "num_outputs_per_prompt", "return_dict": "", "callback": "", "callback_steps": "",
    "callback_on_step_end": "", "callback_on_step_end_tensor_inputs": "",
} | {name: "fps" for name in _FPS}  # fmt: skip


def call_arguments(pipeline_class: type, params: DiffusionSamplingParams) -> dict[str, Any]:
    """Keyword arguments of `pipeline_class.__call__` for all settings that are not None, `extra_args` among them.

    Without prompt, images, generator, output type, callbacks and the number of outputs.

    Raises:
        ValueError: The pipeline does not take a setting; names it, and those that it takes.
    """
    known = call_parameters(pipeline_class)
    arguments = set_arguments(params)
    for name in params.extra_args:
        _check_extra(name)
    arguments |= params.extra_args
    for name in arguments:
        if name not in known:
            raise ValueError(_refusal(pipeline_class, name, list(known)))
    if params.fps is not None:
        arguments |= {name: params.fps for name in _FPS if name in known}
    return arguments


def set_arguments(params: DiffusionSamplingParams) -> dict[str, Any]:
    """The settings that are set and are arguments of pipelines under the same names."""
    settings = {name: getattr(params, name) for name in _ARGUMENTS}
    return {name: value for name, value in settings.items() if value is not None}


def default_fps(pipeline_class: type) -> float | None:
    """The default frames per second of a pipeline's videos; None where its signature has none."""
    known = call_parameters(pipeline_class)
    defaults = (known[name].default for name in _FPS if name in known)
    return next((float(default) for default in defaults if isinstance(default, (int, float))), None)


def _check_extra(name: str) -> None:
    if name in _ARGUMENTS:
        raise ValueError(f"extra_args: {name!r} is a field of its own; set it beside extra_args")
    source = _SET_BY_STAGE.get(name)
    if source is not None:
        where = f"; its value comes from {source}" if source else ""
        raise ValueError(f"extra_args: {name!r} is set by the stage{where}; remove it")


def _refusal(pipeline_class: type, name: str, known: list[str]) -> str:
    settings = [known_name for known_name in known if known_name in _ARGUMENTS]
    extra = [known_name for known_name in known if known_name not in _ARGUMENTS and known_name not in _SET_BY_STAGE]
    return (
        f"{pipeline_class.__name__} does not take {name!r}{nearest(name, known)} (it takes {', '.join(settings)}; in "
        f"extra_args {', '.join(extra)})"
    )
