# SPDX-License-Identifier: Apache-2.0
"""Images of prompts for vLLM's engines, read as viewers show them.

vLLM shows images with 8 bits a channel correctly, and clips others to white.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import vllm.envs as envs
from PIL import Image
from vllm.multimodal.media import ImageMediaIO, MediaConnector, MediaWithBytes

from vllm_omni.media import as_shown


class OmniImageIO(ImageMediaIO):
    """vLLM's reader of image files, for all modes of images."""

    @classmethod
    def from_vllm(cls, media_io: ImageMediaIO) -> "OmniImageIO":
        """Ours in place of one that vLLM has made, with all of its settings."""
        ours = cls.__new__(cls)
        vars(ours).update(vars(media_io))
        return ours

    def _convert_image_mode(self, image: Image.Image | MediaWithBytes[Image.Image]) -> Image.Image:
        image = image.media if isinstance(image, MediaWithBytes) else image
        # vLLM makes the background, in a colour that can be configured.
        return super()._convert_image_mode(as_shown(image, keep_alpha=True))


def show_images(multi_modal_data: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt's media, with its PIL images as RGB, and arrays with 4 channels on white.

    Raises:
        ValueError: An image cannot be read.
    """
    shown = dict(multi_modal_data)
    if "image" in shown:
        images = shown["image"]
        shown["image"] = [_show(image) for image in images] if isinstance(images, list | tuple) else _show(images)
    return shown


def _show(image: Any) -> Any:
    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 4 and image.dtype == np.uint8:
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        return image
    try:
        return as_shown(image)
    except ValueError as error:
        raise ValueError(f"an image {error}") from error


def fetch_images(messages: Iterable[Any], connector: MediaConnector) -> list[Any]:
    """A conversation whose images, as files at an address or in a data URI, are PIL images.

    Raises:
        ValueError, OSError, NotImplementedError, VLLMClientError: One cannot be read.
    """
    media_io = OmniImageIO(**({"image_mode": "RGB"} | connector.media_io_kwargs.get("image", {})))

    def read(part: Any) -> Any:
        address = part.get("image_url") if isinstance(part, Mapping) else None
        url = address.get("url") if isinstance(address, Mapping) else address
        if isinstance(url, str) and url:
            image: Any = connector.load_from_url(url, media_io, fetch_timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT)
            others = {name: value for name, value in part.items() if name not in ("image_url", "detail")}
            return {**others, "type": "image_pil", "image_pil": image.media}
        if isinstance(part, Mapping) and "image_pil" in part:
            return {**part, "image_pil": _show(part["image_pil"])}
        return part

    def read_all(message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        return {**message, "content": [read(part) for part in content]} if isinstance(content, list) else message

    return [read_all(message) for message in messages]
