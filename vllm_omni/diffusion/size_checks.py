# SPDX-License-Identifier: Apache-2.0
"""Sizes of a loaded pipeline's outputs: refused where the pipeline itself would silently make another one."""

from typing import Any

from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from vllm_omni.diffusion.pipeline_info import call_parameters

_PROCESSORS = ("image_processor", "video_processor")
_ROUND_SIZE = 32
"""Pixels: what every pipeline that changes pictures makes multiples of."""
_TEMPORAL_FACTORS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")


def check_size(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> None:
    """
    Args:
        arguments: Of the pipeline's call.

    Raises:
        ValueError: Height, width or number of frames is not one that the pipeline makes; names the nearest.
    """
    factor = _spatial_factor(pipe)
    for name in ("height", "width"):
        size = arguments.get(name)
        if factor and size is not None and size % factor:
            raise ValueError(f"{name} {size}: this pipeline makes multiples of {factor}{_near(size, factor, 0)}")
    factor = next((getattr(pipe, name) for name in _TEMPORAL_FACTORS if hasattr(pipe, name)), None)
    num_frames = arguments.get("num_frames")
    if factor and num_frames is not None and (num_frames - 1) % factor:
        raise ValueError(
            f"num_frames {num_frames}: this pipeline makes multiples of {factor}, and one more"
            f"{_near(num_frames, factor, 1)}"
        )


def fit_image(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> dict[str, Any]:
    """Gives a picture that is to be changed the size of the output: the one asked for, else nearly the picture's own.

    Most pipelines do the former themselves, in the same way; some fail on any other size.

    Args:
        arguments: Of the call of a pipeline that changes a picture, `image`.

    Returns:
        The arguments to call it with.
    """
    image = arguments["image"]
    if not isinstance(image, Image.Image) or "height" not in call_parameters(type(pipe)):
        return arguments
    width, height = (
        arguments.get(name) or max(_ROUND_SIZE, side // _ROUND_SIZE * _ROUND_SIZE)
        for name, side in (("width", image.width), ("height", image.height))
    )
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    return {**arguments, "width": width, "height": height, "image": image}


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """
    Raises:
        ValueError: It is larger than the stage allows.
    """
    if height * width > max_pixels:
        raise ValueError(
            f"{height} x {width} is {height * width} pixels; this stage makes at most {max_pixels} (max_pixels)"
        )


def _spatial_factor(pipe: DiffusionPipeline) -> int | None:
    processors = (getattr(pipe, name, None) for name in _PROCESSORS)  # an image encoder has one of another kind
    processor = next((found for found in processors if isinstance(found, VaeImageProcessor)), None)
    return None if processor is None else processor.config.vae_scale_factor


def _near(size: int, factor: int, offset: int) -> str:
    below = (size - offset) // factor * factor + offset
    nearest = [str(value) for value in (below, below + factor) if value > 0]
    return f"; the nearest {'is' if len(nearest) == 1 else 'are'} {' and '.join(nearest)}"
