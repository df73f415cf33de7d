# SPDX-License-Identifier: Apache-2.0
"""Refuses sizes that a loaded pipeline cannot make, where the pipeline itself would silently make another one."""

from typing import Any

from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor

_PROCESSORS = ("image_processor", "video_processor")
_TEMPORAL_FACTORS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")


class SizeError(ValueError):
    """A size that this stage does not make."""


def check_size(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> None:
    """
    Args:
        arguments: Of the pipeline's call.

    Raises:
        SizeError: Height, width or number of frames is not one that the pipeline makes; names the nearest.
    """
    factor = _spatial_factor(pipe)
    for name in ("height", "width"):
        size = arguments.get(name)
        if factor and size is not None and size % factor:
            raise SizeError(f"{name} {size}: this pipeline makes multiples of {factor}{_near(size, factor, 0)}")
    factor = next((getattr(pipe, name) for name in _TEMPORAL_FACTORS if hasattr(pipe, name)), None)
    num_frames = arguments.get("num_frames")
    if factor and num_frames is not None and (num_frames - 1) % factor:
        raise SizeError(
            f"num_frames {num_frames}: this pipeline makes multiples of {factor}, and one more"
            f"{_near(num_frames, factor, 1)}"
        )


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """
    Raises:
        SizeError: It is larger than the stage allows.
    """
    if height * width > max_pixels:
        raise SizeError(
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
