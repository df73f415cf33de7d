# SPDX-License-Identifier: Apache-2.0
"""Reads images as viewers show them. Encodes the outputs of a diffusion pipeline (as pixels, samples, latents or
files), and decodes them. Thread-safe."""

import contextlib
import io
import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from vllm_omni.sampling_params import DiffusionSamplingParams, OutputFormat

FORMATS: dict[str, tuple[OutputFormat, ...]] = {
    "image": ("pil", "np", "png", "jpeg", "webp", "latent"),
    "video": ("np", "pil", "mp4", "latent"),
    "audio": ("np", "latent"),
}
"""The formats of each type of output; the first is the default."""

DEFAULT_FPS = 16.0
"""Default frames per second of a video: that of the training data of Wan's models."""

_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_INTERLEAVED = {"max_interleave_delta": "0"}  # pictures and sound side by side in a file of any length
_LAYOUTS = {1: "mono", 2: "stereo"}
_AAC_BIT_RATE = 96_000  # of each channel
_ROUNDING = 0.01  # of pixels in [0, 1]
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
    output_type: str,
    outputs: list[torch.Tensor],
    params: DiffusionSamplingParams,
    sample_rate: int | None,
    sounds: Sequence[torch.Tensor] = (),
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`StageOutput.tensors` and `.data` for the finished outputs of one request.

    Args:
        output_type: `image`, `video` or `audio`.
        outputs: One for each output, all of one shape, on the CPU. Images float32 `[H, W, C]` and videos float32
            `[F, H, W, C]`, with 1, 3 or 4 channels in [0, 1]; `[L, H, W, C]` is an image's layers, each an image of its
            own in what is returned; audio float32 `[channels, samples]`; latents of any shape and type if the format is
            `latent`.
        params: The request's; uses `output_format`, `output_quality` and `fps`.
        sample_rate: Of audio, Hz.
        sounds: Of videos with sound, one for each: float32 `[channels, samples]`, or latents.

    Returns:
        Tensors: `image` `[n, H, W, C]`, `video` `[n, F, H, W, C]`, both uint8 for `pil` and float32 for `np`; `audio`
        float32 `[n, channels, samples]`, also beside a `video`; `latents` and, of sound beside a video, `audio_latents`
        `[n, ...]`; or one file each, `file.0`, ..., uint8 `[bytes]`, with the sound.
        Data: `output_type`, `output_format`, and `fps` of videos or `sample_rate` of audio.

    Raises:
        ValueError: The type does not have this format, or values are no pixels.
        FloatingPointError: An output contains NaN or infinity, and would be a black image or noise.
    """
    output_format = check_output_format(output_type, params.output_format)
    if output_type == "image" and output_format != "latent" and outputs[0].ndim == 4:
        outputs = [layer for layers in outputs for layer in layers]
    for index, output in enumerate(outputs):
        _check_numbers(output_type, index, output)
    for index, sound in enumerate(sounds):
        _check_numbers("the sound of video", index, sound)
    data: dict[str, Any] = {"output_type": output_type, "output_format": output_format}
    if output_type == "video":
        data["fps"] = params.fps or DEFAULT_FPS
    if output_type == "audio" or sounds:
        data["sample_rate"] = sample_rate
    if output_format == "latent":
        return {"latents": torch.stack(outputs), **_stacked("audio_latents", sounds)}, data
    if output_format != "np" and output_type != "audio":
        for index, output in enumerate(outputs):
            _check_range(output_type, index, output)
    if output_format == "np":
        return {output_type: torch.stack(outputs).float(), **_stacked("audio", sounds)}, data
    if output_format == "pil":
        pixels = torch.stack([to_uint8(output) for output in outputs])
        return {output_type: pixels, **_stacked("audio", sounds)}, data
    if output_format == "mp4":
        files = [
            encode_mp4(output, data["fps"], sound, sample_rate)
            for output, sound in itertools.zip_longest(outputs, sounds)
        ]
    else:
        files = [encode_image(output, output_format, params.output_quality) for output in outputs]
    return {f"file.{i}": torch.frombuffer(bytearray(file), dtype=torch.uint8) for i, file in enumerate(files)}, data


def _stacked(name: str, sounds: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.stack(list(sounds))} if sounds else {}


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


def as_shown(image: Image.Image, *, keep_alpha: bool = False) -> Image.Image:
    """An image as a viewer shows it: upright, as its EXIF data says, with 8 bits a channel, on white.

    Args:
        keep_alpha: Of an image with transparency, return RGBA instead.

    Returns:
        RGB, or RGBA. May be the image itself.

    Raises:
        ValueError: It cannot be decoded, or has values without a fixed range.
    """
    # Pillow reads a PGM file of 16 bits as 32 bits, and says of no other file which range its 32 bits have.
    is_wide = image.mode in _SIXTEEN_BITS or (image.mode == "I" and image.format == "PPM")
    if image.mode in ("I", "F") and not is_wide:
        raise ValueError(f"has mode {image.mode!r}, whose values have no fixed range; convert it to RGB")
    try:
        with contextlib.suppress(Exception):  # EXIF data that cannot be read
            image = ImageOps.exif_transpose(image)
        if is_wide:
            image = _to_8_bits(image)
        elif image.mode == "La":  # Pillow converts it to LA only.
            image = image.convert("LA")
        if not image.has_transparency_data:
            return image.convert("RGB")
        image = image.convert("RGBA")
    except (OSError, SyntaxError) as error:  # Pillow decodes late, and raises either for broken files.
        raise ValueError(f"cannot be decoded: {error}") from error
    return image if keep_alpha else Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """A grey image of 16 bits as `L`, or `LA` if one of its values is transparent."""
    values = np.asarray(image).clip(0, 65535).astype(np.uint32)
    grey = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    if "transparency" in image.info:
        opaque = np.where(values == image.info["transparency"], 0, 255).astype(np.uint8)
        return Image.merge("LA", (grey, Image.fromarray(opaque)))
    return grey


def to_pil(pixels: torch.Tensor) -> Image.Image:
    """uint8 `[H, W, C]` with 1, 3 or 4 channels as a PIL image: `L`, `RGB` or `RGBA`."""
    array = pixels.numpy()
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def encode_mp4(
    pixels: torch.Tensor, fps: float, sound: torch.Tensor | None = None, sample_rate: int | None = None
) -> bytes:
    """Encodes a video as an MP4 file: H.264, yuv420p, BT.709, and AAC, which all players support.

    Width and height must be even: otherwise the last column or row is repeated.

    Args:
        pixels: float32 `[F, H, W, C]` in [0, 1]. H.264 has no alpha: the background is white.
        fps: Frames per second; may be a fraction.
        sound: float32 `[channels, samples]`, 1 or 2 channels, clipped to [-1, 1].
        sample_rate: Of the sound, Hz.
    """
    import av  # loads FFmpeg: only if needed
    from av.video.reformatter import Colorspace

    file = io.BytesIO()
    frames = _pad_to_even(to_uint8(_on_white(pixels)).numpy())
    with av.open(file, "w", format="mp4", options=_INTERLEAVED) as container:
        pictures = _add_pictures(container, frames, fps)
        track = None if sound is None else _add_track(container, sound, sample_rate)
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            container.mux(pictures.encode(picture.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)))
        container.mux(pictures.encode())
        if track is not None and sound is not None:
            samples = np.ascontiguousarray(sound.clamp(-1, 1).numpy())
            clip = av.AudioFrame.from_ndarray(samples, format="fltp", layout=track.layout.name)
            clip.sample_rate, clip.pts = track.rate, 0  # with a time, the encoder's padding is not played
            container.mux(track.encode(clip))
            container.mux(track.encode())
    return file.getvalue()


def _add_pictures(container: Any, frames: np.ndarray, fps: float) -> Any:
    stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=_H264_OPTIONS)
    stream.height, stream.width = frames.shape[1:3]
    stream.pix_fmt = "yuv420p"
    codec = stream.codec_context
    codec.color_primaries = codec.color_trc = codec.colorspace = _BT709
    codec.color_range = _LIMITED_RANGE
    return stream


def _add_track(container: Any, sound: torch.Tensor, sample_rate: int | None) -> Any:
    if sample_rate is None or len(sound) not in _LAYOUTS:
        raise ValueError(
            f"an mp4 has sound of 1 or 2 channels at a known rate, not {len(sound)} at {sample_rate} Hz; use "
            "output_format np"
        )
    track = container.add_stream("aac", rate=sample_rate, layout=_LAYOUTS[len(sound)])
    track.codec_context.bit_rate = _AAC_BIT_RATE * len(sound)
    return track


def _check_range(output_type: str, index: int, output: torch.Tensor) -> None:
    low, high = torch.aminmax(output)
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        raise ValueError(
            f"{output_type} {index} has values from {low:.2g} to {high:.2g}, such as directions of surfaces, and no "
            "picture; use output_format np"
        )


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
    return [tensors[f"file.{index}"].numpy().tobytes() for index in range(count_media(tensors, data))]


def _as_pil(pixels: torch.Tensor) -> Any:
    """`[H, W, C]` as an image, `[F, H, W, C]` as a list of images."""
    return to_pil(pixels) if pixels.ndim == 3 else [to_pil(frame) for frame in pixels]
