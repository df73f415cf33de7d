# SPDX-License-Identifier: Apache-2.0
"""A prompt's images, of any supported type, as tensors for a diffusion stage: as viewers show them, not resized."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from vllm_omni.media import as_shown, to_pil, to_uint8

_CHANNELS = (1, 3, 4)


def read_images(
    multi_modal_data: Mapping[str, Any] | None, max_pixels: int, *, keep_alpha: bool = False
) -> list[torch.Tensor]:
    """The images of a prompt's `multi_modal_data`, uint8 `[height, width, 3]`, upright and on white.

    Args:
        multi_modal_data: `{"image": one or a list of them}`; each a PIL image, an array `[height, width]` or
            `[height, width, channels]`, or a tensor like that or `[channels, height, width]`. uint8, or floating point
            in [0, 1].
        max_pixels: Height x width of the largest accepted image.
        keep_alpha: An image with transparency is `[height, width, 4]` instead.

    Raises:
        ValueError, TypeError: An item is no image, is too large, or cannot be decoded.
    """
    given = given_media(multi_modal_data)
    for key in given:
        if key != "image":
            raise ValueError(f"multi_modal_data has {key!r}; this stage takes images only, as 'image'")
    items = given.get("image")
    images = [] if items is None else list(items) if isinstance(items, (list, tuple)) else [items]
    return [_read(image, number, max_pixels, keep_alpha) for number, image in enumerate(images)]


def given_media(multi_modal_data: Mapping[str, Any] | None) -> dict[str, Any]:
    """The media of a prompt, by name: all that are not None.

    Raises:
        TypeError: It is no dict.
    """
    if multi_modal_data is not None and not isinstance(multi_modal_data, Mapping):
        raise TypeError(f"multi_modal_data must be a dict like {{'image': ...}}, not {_type(multi_modal_data)}")
    return {str(name): value for name, value in (multi_modal_data or {}).items() if value is not None}


def _read(image: Any, number: int, max_pixels: int, keep_alpha: bool) -> torch.Tensor:
    where = f"image {number}"
    if isinstance(image, Image.Image):
        check_pixels(image.height, image.width, max_pixels, where)
        return _from_pil(image, where, keep_alpha)
    if isinstance(image, (np.ndarray, torch.Tensor)):
        pixels = as_hwc(image, where)
        check_pixels(pixels.shape[0], pixels.shape[1], max_pixels, where)
        pixels = as_uint8(pixels, where)
        return pixels if keep_alpha or pixels.shape[2] == 3 else _from_pil(to_pil(pixels), where, keep_alpha)
    hint = "; open it first: PIL.Image.open(...)" if isinstance(image, (str, bytes)) else ""
    raise TypeError(f"{where} is {_type(image)}; give a PIL image, a numpy array or a tensor{hint}")


def _from_pil(image: Image.Image, where: str, keep_alpha: bool) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(as_shown(image, keep_alpha=keep_alpha)))
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def as_hwc(image: np.ndarray | torch.Tensor, where: str) -> torch.Tensor:
    """An image as `[height, width, channels]`.

    Where the shape is ambiguous, an array's channels are last, a tensor's first.
    """
    is_tensor = isinstance(image, torch.Tensor)
    if isinstance(image, torch.Tensor) and (image.is_meta or image.layout != torch.strided):
        raise TypeError(f"{where} is a tensor without plain pixels ({image.layout}, {image.device}); give a dense one")
    try:
        pixels = image.detach().cpu() if isinstance(image, torch.Tensor) else torch.from_numpy(image.copy())
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from error
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    shape = list(pixels.shape)
    if is_tensor and len(shape) == 3 and shape[0] in _CHANNELS:
        return pixels.permute(1, 2, 0)
    if len(shape) != 3 or shape[2] not in _CHANNELS:
        raise ValueError(
            f"{where} has shape {shape}; it must be [height, width, channels] with 1, 3 or 4 channels. Give several "
            "images as a list"
        )
    return pixels


def as_uint8(pixels: torch.Tensor, where: str) -> torch.Tensor:
    """Bytes of what has bytes, or floating point in [0, 1]; grey as RGB."""
    if pixels.is_floating_point():
        pixels = pixels.float()
        if not bool(((pixels >= 0) & (pixels <= 1)).all()):  # False for NaN, too
            raise ValueError(f"{where} has values outside [0, 1]; floating point images must be in that range")
        pixels = to_uint8(pixels)
    if pixels.dtype != torch.uint8:
        raise TypeError(f"{where} is {pixels.dtype}; give uint8, or floating point in [0, 1]")
    if pixels.shape[2] == 1:
        pixels = pixels.expand(-1, -1, 3)
    return pixels.contiguous()


def check_pixels(height: int, width: int, max_pixels: int, where: str) -> None:
    """
    Raises:
        ValueError: An input image is empty, or larger than the stage's limit.
    """
    if height < 1 or width < 1:
        raise ValueError(f"{where} is empty: {height} x {width} pixels")
    if height * width > max_pixels:
        raise ValueError(
            f"{where} is {height} x {width}, {height * width} pixels; this stage takes at most {max_pixels} "
            "(max_pixels): make it smaller"
        )


def _type(value: Any) -> str:
    return f"a {type(value).__name__}"
