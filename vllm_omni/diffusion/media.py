# SPDX-License-Identifier: Apache-2.0
"""What a diffusion stage sent, as its caller wants to hold it: the way back from `encoding.py`."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_omni.diffusion.encoding import FORMATS, to_pil


def count_media(tensors: Mapping[str, torch.Tensor], data: Mapping[str, Any]) -> int:
    """How many images, videos or clips there are; 0 in the output of any other stage, whatever that holds."""
    output_type, output_format = data.get("output_type"), data.get("output_format")
    if not isinstance(output_type, str) or output_format not in FORMATS.get(output_type, ()):
        return 0
    whole = tensors.get("latents" if output_format == "latent" else output_type)
    if whole is not None:
        return len(whole) if whole.ndim else 0
    return sum(name.startswith("file.") for name in tensors)


def read_media(tensors: Mapping[str, torch.Tensor], data: Mapping[str, Any]) -> list[Any]:
    """The outputs of a request, one entry each.

    Args:
        tensors, data: As `encoding.encode_outputs` makes them; `count_media` is not 0.

    Returns:
        By format: `pil` a PIL image, or a list of them for a video; `np` a float32 array; `latent` a tensor;
        `png`, `jpeg`, `webp` and `mp4` the bytes of a file.
    """
    output_type, output_format = data["output_type"], data["output_format"]
    if output_format == "latent":
        return list(tensors["latents"])
    if output_format == "np":
        return list(tensors[output_type].numpy())
    if output_format == "pil":
        return [_as_pil(output) for output in tensors[output_type]]
    return [tensors[f"file.{index}"].numpy().tobytes() for index in range(len(tensors))]


def _as_pil(pixels: torch.Tensor) -> Any:
    """`[H, W, C]` as a picture, `[F, H, W, C]` as a list of them."""
    return to_pil(pixels) if pixels.ndim == 3 else [to_pil(frame) for frame in pixels]
