# SPDX-License-Identifier: Apache-2.0
"""Encodes the outputs of a diffusion pipeline (as pixels, samples, latents or files), and decodes them. Thread-safe."""

import io
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from PIL import Image

from vllm_omni.sampling_params import DiffusionSamplingParams, OutputFormat

FORMATS: dict[str, tuple[OutputFormat, ...]] = {
    "image": ("pil", "np", "png", "jpeg", "webp", "latent"),
    "video": ("np", "pil", "mp4", "latent"),
    "audio": ("np", "latent"),
}
"""The formats of each type of output; the first is the default."""

DEFAULT_FPS = 16.0
"""Default frames per second of a video: that of the training data of Wan's models."""

_H264_OPTIONS = {"crf": "18"}  # constant quality, visually lossless
_BT709 = 1  # of H.264's tables of primaries, transfer functions and matrices
_LIMITED_RANGE = 1


def check_output_format(output_type: str, output_format: str | None) -> OutputFormat:
    """The output format of a request.

    Args:
        output_type: `image`, `video` or `audio`.
        output_format: The requested format; None: the default.

    Raises:
        ValueError: The type does not have this format; lists its formats.
    """
    formats = FORMATS[output_type]
    if output_format is None:
        return formats[0]
    for known in formats:
        if known == output_format:
            return known
    raise ValueError(
        f"output_format {output_format!r} is not supported for {output_type}; use one of {', '.join(formats)}"
    )


def encode_outputs(
    output_type: str, outputs: list[torch.Tensor], params: DiffusionSamplingParams, sample_rate: int | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`StageOutput.tensors` and `.data` for the finished outputs of one request.

    Args:
        output_type: `image`, `video` or `audio`.
        outputs: One for each output, all of one shape, on the CPU. Images float32 `[H, W, C]` and videos float32
            `[F, H, W, C]`, with 1, 3 or 4 channels in [0, 1]; audio float32 `[channels, samples]`; latents of any
            shape and type if the format is `latent`.
        params: The request's; uses `output_format`, `output_quality` and `fps`.
        sample_rate: Of audio, Hz.

    Returns:
        Tensors: `image` `[n, H, W, C]`, `video` `[n, F, H, W, C]`, both uint8 for `pil` and float32 for `np`; `audio`
        float32 `[n, channels, samples]`; `latents` `[n, ...]`; or one file each, `file.0`, ..., uint8 `[bytes]`.
        Data: `output_type`, `output_format`, and `fps` of videos or `sample_rate` of audio.

    Raises:
        ValueError: The type does not have this format.
        FloatingPointError: An output contains NaN or infinity, and would be a black image or noise.
    """
    output_format = check_output_format(output_type, params.output_format)
    for index, output in enumerate(outputs):
        _check_numbers(output_type, index, output)
    data: dict[str, Any] = {"output_type": output_type, "output_format": output_format}
    if output_type == "video":
        data["fps"] = params.fps or DEFAULT_FPS
    elif output_type == "audio":
        data["sample_rate"] = sample_rate
    if output_format == "latent":
        return {"latents": torch.stack(outputs)}, data
    if output_format == "np":
        return {output_type: torch.stack(outputs).float()}, data
    if output_format == "pil":
        return {output_type: torch.stack([to_uint8(output) for output in outputs])}, data
    if output_format == "mp4":
        files = [encode_mp4(output, data["fps"]) for output in outputs]
    else:
        files = [encode_image(output, output_format, params.output_quality) for output in outputs]
    return {f"file.{i}": torch.frombuffer(bytearray(file), dtype=torch.uint8) for i, file in enumerate(files)}, data


def to_uint8(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels in [0, 1] as bytes, rounded as diffusers' `numpy_to_pil` does."""
    values = np.multiply(pixels.float().numpy(), 255)  # on a CPU several times as fast as torch
    np.clip(np.rint(values, out=values), 0, 255, out=values)
    return torch.from_numpy(values.astype(np.uint8))


def encode_image(pixels: torch.Tensor, file_format: str, quality: int) -> bytes:
    """Encodes an image as a file.

    Args:
        pixels: float32 `[H, W, C]` in [0, 1]; 1 channel is grey, 4 are colour and alpha. JPEG has no alpha: the
            background is white.
        file_format: `png`, `jpeg` or `webp`.
        quality: Of `jpeg` and `webp`, 1 to 100.
    """
    image = to_pil(to_uint8(_on_white(pixels) if file_format == "jpeg" else pixels))
    file = io.BytesIO()
    image.save(file, file_format.upper(), **({} if file_format == "png" else {"quality": quality}))
    return file.getvalue()


def to_pil(pixels: torch.Tensor) -> Image.Image:
    """uint8 `[H, W, C]` with 1, 3 or 4 channels as a PIL image: `L`, `RGB` or `RGBA`."""
    array = pixels.numpy()
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def encode_mp4(pixels: torch.Tensor, fps: float) -> bytes:
    """Encodes a video as an MP4 file: H.264, yuv420p, BT.709, which all players support.

    Width and height must be even: otherwise the last column or row is repeated.

    Args:
        pixels: float32 `[F, H, W, C]` in [0, 1]. H.264 has no alpha: the background is white.
        fps: Frames per second; may be a fraction.
    """
    import av  # loads FFmpeg: only if needed
    from av.video.reformatter import Colorspace

    file = io.BytesIO()
    frames = _pad_to_even(to_uint8(_on_white(pixels)).numpy())
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=_H264_OPTIONS)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        codec = stream.codec_context
        codec.color_primaries = codec.color_trc = codec.colorspace = _BT709
        codec.color_range = _LIMITED_RANGE
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            container.mux(stream.encode(picture.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)))
        container.mux(stream.encode())
    return file.getvalue()


def _check_numbers(output_type: str, index: int, output: torch.Tensor) -> None:
    if not all(map(torch.isfinite, torch.aminmax(output))):  # the extremes are NaN if any value is
        raise FloatingPointError(
            f"{output_type} {index} of the request contains values that are not finite (NaN, infinity). The usual "
            "cause is a VAE or a denoiser that overflows in half precision: set dtype to bfloat16 or float32"
        )


def _on_white(pixels: torch.Tensor) -> torch.Tensor:
    """`[..., C]` with 1, 3 or 4 channels to `[..., 3]`."""
    if pixels.shape[-1] == 4:
        colour, alpha = pixels[..., :3], pixels[..., 3:]
        return colour * alpha + (1 - alpha)
    return pixels.expand(*pixels.shape[:-1], 3)


def _pad_to_even(frames: np.ndarray) -> np.ndarray:
    """`[F, H, W, 3]`, contiguous."""
    height, width = frames.shape[1:3]
    padded = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(padded)


def count_media(tensors: Mapping[str, torch.Tensor], data: Mapping[str, Any]) -> int:
    """The number of images, videos or clips; 0 for the output of other stages."""
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
        tensors, data: The results of `encode_outputs`; `count_media` is not 0.

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
    """`[H, W, C]` as an image, `[F, H, W, C]` as a list of images."""
    return to_pil(pixels) if pixels.ndim == 3 else [to_pil(frame) for frame in pixels]
