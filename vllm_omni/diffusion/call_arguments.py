# SPDX-License-Identifier: Apache-2.0
"""From a request's settings to the keyword arguments of its pipeline's call.

It knows the settings' names and the call's signature; whether a value makes sense is for `input_processor.py` and for
the pipeline to say.
"""

from typing import Any

from vllm_omni.config.utils import nearest
from vllm_omni.diffusion.pipeline_info import call_parameters
from vllm_omni.sampling_params import DiffusionSamplingParams

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
