# SPDX-License-Identifier: Apache-2.0
"""Outputs of a pipeline as files, as content of a chat message, and their usage.

Knows no endpoint. Encoding and base64 of large files take long: call it in a thread beside the event loop.
"""

import base64
import io
from itertools import zip_longest
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from openai.types.images_response import Usage, UsageInputTokensDetails
from PIL import Image

from vllm_omni.entrypoints.openai.audio_formats import DEFAULT_SAMPLE_RATE, encode_audio, first_clip
from vllm_omni.media import encode_image, encode_mp4
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.sampling_params import DiffusionSamplingParams

IMAGE_FORMATS = ("png", "jpeg", "webp")
FILE_FORMATS = (*IMAGE_FORMATS, "mp4")
"""What answers hold: files, not arrays or latents."""

FINISH_REASON_HEADER = "X-Finish-Reason"
"""Why a whole file or transcript ended: `length` if it was cut at the model's limit, so that its end is missing."""


def message_fields(output: OmniRequestOutput) -> dict[str, Any]:
    """Images or videos as `images` or `videos` of a chat message. Images are PNG unless they are files, videos MP4.

    Each is `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`, or the same with `video_url`.
    """
    if output.final_output_type == "image":
        file_format = output.output_format if output.output_format in IMAGE_FORMATS else "png"
        files = [as_image_file(image, "png") for image in output.images]
        return {"images": [_part("image_url", f"image/{file_format}", file) for file in files]}
    return {"videos": [_part("video_url", "video/mp4", file) for file in as_video_files(output)]}


def as_image_file(image: Any, file_format: str) -> bytes:
    """
    Args:
        image: One of `OmniRequestOutput.images`; a file is returned as it is.
        file_format: `png`, `jpeg` or `webp`.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, file_format.upper())
        return file.getvalue()
    return encode_image(torch.as_tensor(image), file_format, DiffusionSamplingParams().output_quality)


def as_video_files(output: OmniRequestOutput) -> list[bytes]:
    """The videos of an output: files as they are, all others as MP4 files with their sound, if there is one."""
    sounds = output.multimodal_output.get("audio", ())
    return [
        _as_video_file(video, output.fps, sound, output.sample_rate)
        for video, sound in zip_longest(output.videos, sounds)
    ]


def _as_video_file(video: Any, fps: float | None, sound: torch.Tensor | None, sample_rate: int | None) -> bytes:
    if isinstance(video, bytes):
        return video
    assert fps is not None, "every video has a speed"
    if isinstance(video, list):
        video = np.stack([np.asarray(frame) for frame in video]).astype(np.float32) / 255
    return encode_mp4(torch.as_tensor(video), fps, sound, sample_rate)


def describe_video(file: bytes) -> tuple[str, str]:
    """`WIDTHxHEIGHT`, and the length in seconds, of an MP4 from `as_video_files`."""
    with av.open(io.BytesIO(file)) as container:
        (stream,) = container.streams.video
        assert stream.guessed_rate is not None
        # Not the duration of the file, which is in milliseconds.
        return f"{stream.width}x{stream.height}", f"{float(stream.frames / stream.guessed_rate):g}"


def read_first_frame(path: Path) -> Image.Image:
    """The first frame of such a file."""
    with av.open(str(path)) as container:
        return next(container.decode(video=0)).to_image()


def encode_speech(output: OmniRequestOutput, audio_format: str) -> str:
    """The file of whole speech, in base64."""
    samples = first_clip(output.multimodal_output["audio"])
    return to_base64(encode_audio(samples, audio_format, output.sample_rate or DEFAULT_SAMPLE_RATE))


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def finish_reason_of(output: OmniRequestOutput) -> str:
    """Why an output that is not text ended."""
    return (output.outputs[0].finish_reason if output.outputs else None) or "stop"


def usage_of(output: OmniRequestOutput) -> Usage:
    """Tokens that vLLM stages have read and written for an output. A diffusion model has none."""
    read = output.stage_metrics[0].num_input_tokens if output.stage_metrics else 0
    written = sum(stage.num_output_tokens for stage in output.stage_metrics)
    return Usage(
        input_tokens=read,
        output_tokens=written,
        total_tokens=read + written,
        input_tokens_details=UsageInputTokensDetails(text_tokens=read, image_tokens=0),
    )


def _part(kind: str, media_type: str, file: bytes) -> dict[str, Any]:
    return {"type": kind, kind: {"url": f"data:{media_type};base64,{to_base64(file)}"}}
