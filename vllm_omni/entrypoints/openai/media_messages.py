# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos as content of a chat message, and a diffusion model's settings as a request may give them.

Knows no endpoint. Encoding and base64 of large files take their time: call it in a thread beside the event loop.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import torch
from PIL import Image
from vllm.exceptions import VLLMValidationError

from vllm_omni.config.utils import convert, nearest, split_error
from vllm_omni.diffusion.setting_checks import check_values
from vllm_omni.media import encode_image, encode_mp4
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.sampling_params import DiffusionSamplingParams

IMAGE_FORMATS = ("png", "jpeg", "webp")
FILE_FORMATS = (*IMAGE_FORMATS, "mp4")
"""What travels over HTTP: files. Arrays and latents do not."""

_NOT_IN_REQUESTS = ("preview_every", "extra_args", "lora_scale")

SETTINGS = tuple(name for name in DiffusionSamplingParams.__struct_fields__ if name not in _NOT_IN_REQUESTS)
"""What a request may set. Previews are asked for by the endpoints that can show them. Further arguments of the pipeline
have no bounds that anybody could check: `default_sampling_params` of the stage."""

ADAPTER_SETTINGS = ("lora", "lora_scale")
"""Where a request may also name one of the server's LoRA adapters, and say how strongly it counts."""


def image_parts(output: OmniRequestOutput) -> list[dict[str, Any]]:
    """The images of a diffusion stage's output as parts of a message; empty if it has none. PNG unless they are files.

    Each is `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`.
    """
    file_format = output.output_format if output.output_format in IMAGE_FORMATS else "png"
    files = [as_image_file(image, "png") for image in output.images]
    return [_part("image_url", f"image/{file_format}", file) for file in files]


def video_parts(output: OmniRequestOutput) -> list[dict[str, Any]]:
    """The videos of a diffusion stage's output as parts of a message, MP4; empty if it has none.

    Each is `{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}`.
    """
    files = [as_video_file(video, output.fps) for video in output.videos]
    return [_part("video_url", "video/mp4", file) for file in files]


def as_image_file(image: Any, file_format: str) -> bytes:
    """
    Args:
        image: One of `OmniRequestOutput.images`; a file stays what it is.
        file_format: `png`, `jpeg` or `webp`.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, file_format.upper())
        return file.getvalue()
    return encode_image(torch.as_tensor(image), file_format, DiffusionSamplingParams().output_quality)


def as_video_file(video: Any, fps: float | None) -> bytes:
    """
    Args:
        video: One of `OmniRequestOutput.videos`; a file stays what it is, and any other becomes an MP4.
        fps: Frames in a second; not needed for a file.
    """
    if isinstance(video, bytes):
        return video
    assert fps is not None, "every video has a speed"
    if isinstance(video, list):
        video = np.stack([np.asarray(frame) for frame in video]).astype(np.float32) / 255
    return encode_mp4(torch.as_tensor(video), fps)


def describe_video(file: bytes) -> tuple[str, str]:
    """`WIDTHxHEIGHT`, and the length in seconds, of an MP4 that `as_video_file` gave."""
    with av.open(io.BytesIO(file)) as container:
        (stream,) = container.streams.video
        assert stream.guessed_rate is not None
        # Not the duration of the file, which is in milliseconds.
        return f"{stream.width}x{stream.height}", f"{float(stream.frames / stream.guessed_rate):g}"


def read_first_frame(path: Path) -> Image.Image:
    """The first frame of such a file."""
    with av.open(str(path)) as container:
        return next(container.decode(video=0)).to_image()


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def diffusion_settings(request_extra: Mapping[str, Any], *, adapters: bool = False) -> dict[str, Any]:
    """What a request asks of a diffusion model, as fields of `DiffusionSamplingParams`; without what is null.

    Args:
        adapters: The request may name an adapter, too: with `ADAPTER_SETTINGS`, see `MediaMaker.with_adapter`.
        request_extra: Fields of the request. Settings stand in the one named `extra_body`, where nothing else may, or
            at the top level beside what is none.

    Raises:
        VLLMValidationError: A setting is unknown, stands in two places, or no pipeline could make sense of its value.
    """
    body = request_extra.get("extra_body")
    if body is None:
        body = {}
    if not isinstance(body, Mapping):
        raise VLLMValidationError("extra_body must be an object of settings", parameter="extra_body")
    known = SETTINGS + ADAPTER_SETTINGS if adapters else SETTINGS
    settings = {name: request_extra[name] for name in known if request_extra.get(name) is not None}
    for name, value in body.items():
        if name not in known:
            raise VLLMValidationError(_unknown(name, known), parameter=f"extra_body.{name}")
        if name in settings and value is not None and settings[name] != value:
            raise VLLMValidationError(f"{name} is in extra_body and, another one, beside it; keep one", parameter=name)
        if value is not None:
            settings[name] = value
    return {name: _checked(name, value) for name, value in settings.items()}


def _checked(name: str, value: Any) -> Any:
    if name == "lora":
        if not isinstance(value, str):
            raise VLLMValidationError("lora must be the name of an adapter", parameter=name)
        return value
    try:
        params = convert({name: value}, DiffusionSamplingParams)
        check_values(params)
    except msgspec.ValidationError as error:
        raise VLLMValidationError(f"{name}: {split_error(error)[0]}", parameter=name) from error
    except (ValueError, TypeError) as error:
        raise VLLMValidationError(str(error), parameter=name) from error
    if name == "output_format" and value not in FILE_FORMATS:
        raise VLLMValidationError(
            f"output_format {value!r} is not for HTTP; give one of {', '.join(FILE_FORMATS)}", parameter=name
        )
    return getattr(params, name)


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in DiffusionSamplingParams.__struct_fields__:
        return f"{name} cannot be set by a request; the server's operator can, in the stage's default_sampling_params"
    return f"extra_body has no {name!r}{nearest(name, known)} (known: {', '.join(known)})"


def _part(kind: str, media_type: str, file: bytes) -> dict[str, Any]:
    return {"type": kind, kind: {"url": f"data:{media_type};base64,{to_base64(file)}"}}
