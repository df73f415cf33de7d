# SPDX-License-Identifier: Apache-2.0
"""Encoded outputs, decoded with the libraries of users."""

import io
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from vllm_omni.distributed.connectors import InlineConnector, PayloadReceiver, PayloadSender
from vllm_omni.media import (
    DEFAULT_FPS,
    FORMATS,
    as_shown,
    check_output_format,
    count_media,
    encode_outputs,
    read_media,
    to_uint8,
)
from vllm_omni.outputs import StageOutput
from vllm_omni.sampling_params import DiffusionSamplingParams
from vllm_omni.testing.media import make_image, make_video

HEIGHT, WIDTH = 48, 64
GREY_16 = np.array([[0, 257 * 100, 65535], [128, 129, 300]], np.uint16)
GREY_8 = [[0, 100, 255], [0, 1, 1]]


def pictures(count: int = 2, channels: int = 3) -> list[torch.Tensor]:
    """float32 `[48, 64, channels]` in [0, 1]; values between those of bytes, as in pipelines."""
    made = []
    for seed in range(count):
        image = make_image(seed, WIDTH, HEIGHT).convert({1: "L", 3: "RGB"}.get(channels, "RGB"))
        pixels = torch.from_numpy(np.array(image)).float().reshape(HEIGHT, WIDTH, -1) / 255
        noise = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
        made.append((pixels + noise / 255).clamp(0, 1))
    if channels == 4:
        alpha = torch.linspace(0, 1, WIDTH).expand(HEIGHT, WIDTH)[..., None]
        made = [torch.cat([pixels, alpha], dim=-1) for pixels in made]
    return made


def films(count: int = 1, frames: int = 5, height: int = HEIGHT, width: int = WIDTH) -> list[torch.Tensor]:
    """float32 `[frames, height, width, 3]` in [0, 1]."""
    return [torch.from_numpy(make_video(seed, frames, width, height)).float() / 255 for seed in range(count)]


def encode(output_type: str, outputs: list[torch.Tensor], output_format: str | None = None, **fields):
    """The caller's output after it was sent inline, and its `data`."""
    params = DiffusionSamplingParams(output_format=output_format, **fields)
    tensors, data = encode_outputs(output_type, outputs, params, 44_100)
    ref, frames = PayloadSender(InlineConnector()).put(
        StageOutput(request_id="r", stage_id=0, tensors=tensors, data=data)
    )
    sent = PayloadReceiver(Path()).get(StageOutput, ref, [memoryview(bytes(frame)) for frame in frames])
    assert sent.num_media == count_media(tensors, data) == len(outputs)
    return read_media(sent.tensors, sent.data), sent.data


class Stream(NamedTuple):
    """What a file says of its video; PyAV's own object must not be read after its container was closed."""

    codec: str
    pix_fmt: str | None
    rate: float
    seconds: float


def decode(file: bytes) -> tuple[np.ndarray, Stream]:
    """uint8 `[frames, height, width, 3]`, and the stream."""
    with av.open(io.BytesIO(file)) as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        seconds = float(stream.duration * stream.time_base)
        return frames, Stream(stream.codec.name, stream.pix_fmt, float(stream.average_rate), seconds)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_images_equal_those_of_diffusers(channels, mode):
    from diffusers.image_processor import VaeImageProcessor

    outputs = pictures(channels=channels)
    images, data = encode("image", outputs)
    theirs = VaeImageProcessor.numpy_to_pil(torch.stack(outputs).numpy())
    assert [image.mode for image in images] == [mode] * 2
    assert [image.tobytes() for image in images] == [image.tobytes() for image in theirs]
    assert data == {"output_type": "image", "output_format": "pil"}


def test_rounding_equals_that_of_diffusers():
    from diffusers.image_processor import VaeImageProcessor

    values = torch.cat([torch.arange(256) / 255, (torch.arange(255) + 0.5) / 255, torch.rand(1000)])
    theirs = VaeImageProcessor.numpy_to_pil(values.reshape(1, 1, -1, 1).numpy())[0]
    assert to_uint8(values).numpy().tobytes() == theirs.tobytes()


def test_png_is_lossless():
    for channels in (1, 3, 4):
        outputs = pictures(channels=channels)
        files, data = encode("image", outputs, "png")
        for file, output in zip(files, outputs, strict=True):
            image = Image.open(io.BytesIO(file))
            assert image.format == "PNG"
            decoded = np.asarray(image).reshape(HEIGHT, WIDTH, channels)
            assert np.array_equal(decoded, to_uint8(output).numpy())
    assert data == {"output_type": "image", "output_format": "png"}


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_lossy_files_are_close(output_format):
    outputs = pictures()
    files, _ = encode("image", outputs, output_format, output_quality=95)
    small, _ = encode("image", outputs, output_format, output_quality=10)
    for file, output in zip(files, outputs, strict=True):
        image = Image.open(io.BytesIO(file))
        assert image.format == output_format.upper() and image.mode == "RGB"
        assert np.abs(np.asarray(image) / 255.0 - output.numpy()).mean() < 0.02
    assert all(len(a) < len(b) for a, b in zip(small, files, strict=True))


def test_transparency_is_kept_or_has_a_white_background():
    (output,) = pictures(1, channels=4)
    ((webp,), _), ((jpeg,), _) = (encode("image", [output], name, output_quality=95) for name in ("webp", "jpeg"))
    assert Image.open(io.BytesIO(webp)).mode == "RGBA"
    laid = np.asarray(Image.open(io.BytesIO(jpeg))) / 255.0
    assert laid.shape == (HEIGHT, WIDTH, 3)
    assert laid[:, 0].min() > 0.9, "the left column is transparent"
    assert np.abs(laid - (output[..., :3] * output[..., 3:] + 1 - output[..., 3:]).numpy()).mean() < 0.02


def test_arrays_are_unchanged():
    for output_type, outputs in (("image", pictures()), ("video", films(2)), ("audio", [torch.randn(2, 30)] * 2)):
        arrays, _ = encode(output_type, outputs, "np")
        for array, output in zip(arrays, outputs, strict=True):
            assert array.dtype == np.float32
            assert np.array_equal(array, output.numpy())


@pytest.mark.parametrize("output_type", ["image", "video", "audio"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_unchanged(output_type, dtype):
    outputs = [torch.randn(16, 8).to(dtype) for _ in range(3)]
    latents, data = encode(output_type, outputs, "latent")
    assert all(torch.equal(ours, output) and ours.dtype == dtype for ours, output in zip(latents, outputs, strict=True))
    assert data["output_type"] == output_type


def test_a_video_as_images():
    (film,) = films()
    ((frames,), data) = encode("video", [film], "pil", fps=8)
    assert [frame.size for frame in frames] == [(WIDTH, HEIGHT)] * 5
    assert np.array_equal(np.stack([np.asarray(frame) for frame in frames]), to_uint8(film).numpy())
    assert data == {"output_type": "video", "output_format": "pil", "fps": 8}


def test_a_video_as_a_file():
    film, other = films(2, frames=9)
    files, _ = encode("video", [film, other], "mp4", fps=12)
    for file, expected in zip(files, (film, other), strict=True):
        frames, stream = decode(file)
        assert frames.shape == (9, HEIGHT, WIDTH, 3)
        assert np.abs(frames / 255.0 - expected.numpy()).mean() < 0.03
        assert (stream.codec, stream.pix_fmt, stream.rate) == ("h264", "yuv420p", 12)
        assert stream.seconds == pytest.approx(9 / 12)


def tones(seconds: float, rate: int, *pitches: float) -> torch.Tensor:
    """float32 `[pitches, samples]`"""
    times = torch.arange(round(seconds * rate)) / rate
    return torch.stack([0.5 * torch.sin(2 * np.pi * pitch * times) for pitch in pitches])


@pytest.mark.parametrize(("rate", "pitches"), [(24_000, (440, 660)), (48_000, (440,))])
def test_a_video_with_sound(rate, pitches):
    """In time: the padding of the codec is not played."""
    (film,), sound = films(1, frames=12), tones(1.0, rate, *pitches)
    params = DiffusionSamplingParams(output_format="mp4", fps=12)
    tensors, data = encode_outputs("video", [film], params, rate, [sound])
    (file,) = read_media(tensors, data)
    with av.open(io.BytesIO(file)) as container:
        track = container.streams.audio[0]
        played = np.concatenate([frame.to_ndarray() for frame in container.decode(track)], axis=1)
        assert (track.codec.name, track.rate, float(track.duration * track.time_base)) == ("aac", rate, 1.0)
    assert len(played) == len(pitches)
    assert np.abs(played[:, :rate] - sound.numpy()).mean() < 0.02
    assert decode(file)[0].shape == (12, HEIGHT, WIDTH, 3)
    assert data == {"output_type": "video", "output_format": "mp4", "fps": 12, "sample_rate": rate}


@pytest.mark.parametrize("output_format", ["np", "pil", "latent"])
def test_the_sound_of_videos_beside_them(output_format):
    sounds = [tones(0.1, 24_000, pitch) for pitch in (440, 660)]
    params = DiffusionSamplingParams(output_format=output_format)
    tensors, data = encode_outputs("video", films(2), params, 24_000, sounds)
    assert torch.equal(tensors["audio_latents" if output_format == "latent" else "audio"], torch.stack(sounds))
    assert count_media(tensors, data) == len(read_media(tensors, data)) == 2
    assert data["sample_rate"] == 24_000


def test_broken_sound_and_sound_that_no_file_has_are_refused():
    params = DiffusionSamplingParams(output_format="mp4")
    with pytest.raises(FloatingPointError, match="sound of video 0"):
        encode_outputs("video", films(1), params, 24_000, [torch.full((1, 9), torch.nan)])
    with pytest.raises(ValueError, match="not 6 at 24000 Hz; use output_format np"):
        encode_outputs("video", films(1), params, 24_000, [torch.zeros(6, 9)])


def test_the_colours_of_a_video():
    """Large areas, where the lower colour resolution does not matter: a wrong matrix is off by 10 and more."""
    colours = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0], [0.5, 0.2, 0.7]])
    film = colours[:, None, None].expand(6, 32, 32, 3)
    ((file,), _) = encode("video", [film], "mp4")
    with av.open(io.BytesIO(file)) as container:
        frames = [frame.reformat(format="rgb24", src_colorspace="ITU709") for frame in container.decode(video=0)]
    assert {frame.colorspace for frame in frames} == {1}, "in the file: BT.709"
    seen = np.stack([frame.to_ndarray()[16, 16] for frame in frames])
    assert np.abs(seen - to_uint8(colours).numpy().astype(int)).max() <= 5


@pytest.mark.parametrize(("height", "width"), [(33, 48), (32, 47), (33, 47)])
def test_a_video_of_an_odd_size_is_padded(height, width):
    (film,) = films(1, 3, height, width)
    ((file,), _) = encode("video", [film], "mp4")
    frames, _ = decode(file)
    assert frames.shape == (3, height + height % 2, width + width % 2, 3)
    assert np.abs(frames[:, :height, :width] / 255.0 - film.numpy()).mean() < 0.05


@pytest.mark.parametrize(("fps", "rate"), [(None, DEFAULT_FPS), (24, 24), (23.976, 23.976), (29.97, 29.97), (0.5, 0.5)])
def test_frames_per_second(fps, rate):
    ((file,), data) = encode("video", films(1, 3), "mp4", fps=fps)
    _, stream = decode(file)
    assert stream.rate == pytest.approx(rate, rel=1e-4)
    assert data["fps"] == rate


@pytest.mark.parametrize("channels", [1, 4])
def test_a_video_without_colour_or_with_transparency(channels):
    film = torch.full((2, 32, 32, channels), 0.5)
    ((file,), _) = encode("video", [film], "mp4")
    frames, _ = decode(file)
    expected = 0.5 if channels == 1 else 0.75  # half of grey, half of white
    assert np.abs(frames / 255.0 - expected).max() < 0.02


def test_audio_has_its_sample_rate():
    clips, data = encode("audio", [torch.zeros(2, 10)])
    assert [clip.shape for clip in clips] == [(2, 10)]
    assert data == {"output_type": "audio", "output_format": "np", "sample_rate": 44_100}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("output_type", "output_format"),
    [(output_type, name) for output_type, names in FORMATS.items() for name in names],
)
def test_nan_and_infinity_are_refused(output_type, output_format, bad):
    good = {"image": pictures(1)[0], "video": films()[0], "audio": torch.zeros(1, 9)}[output_type]
    broken = good.clone()
    broken.view(-1)[7] = bad
    with pytest.raises(FloatingPointError, match=rf"{output_type} 1 .*half precision.*dtype"):
        encode(output_type, [good, broken], output_format)


@pytest.mark.parametrize(
    ("output_type", "requested", "known"),
    [
        ("image", "mp4", "pil, np, png, jpeg, webp, latent"),
        ("image", "jpg", "pil, np, png"),
        ("video", "png", "np, pil, mp4, latent"),
        ("audio", "mp4", "np, latent"),
    ],
)
def test_an_unknown_format_is_refused(output_type, requested, known):
    with pytest.raises(ValueError, match=f"'{requested}' .*{known}"):
        check_output_format(output_type, requested)


def test_the_formats():
    assert {kind: check_output_format(kind, None) for kind in FORMATS} == {"image": "pil", "video": "np", "audio": "np"}
    assert all(check_output_format(kind, name) == name for kind, names in FORMATS.items() for name in names)


def saved(image: Image.Image, file_format: str, **options: Any) -> Image.Image:
    """The image as it is read from a file."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return Image.open(file)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"]
)
def test_an_image_of_any_mode_is_shown(mode: str) -> None:
    assert as_shown(Image.new(mode, (4, 3))).mode == "RGB"
    kept = as_shown(Image.new(mode, (4, 3)), keep_alpha=True)
    assert kept.size == (4, 3) and kept.mode == ("RGBA" if mode in ("LA", "La", "PA", "RGBA", "RGBa") else "RGB")


@pytest.mark.parametrize(
    "image",
    [
        saved(Image.new("RGBA", (1, 1), (255, 0, 0, 0)), "PNG"),
        saved(Image.new("LA", (1, 1), (0, 0)), "PNG"),
        saved(Image.new("P", (1, 1), 0), "PNG", transparency=0),
        saved(Image.new("P", (1, 1), 0), "GIF", transparency=0),
        saved(Image.new("L", (1, 1), 7), "PNG", transparency=7),
        saved(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG", transparency=(1, 2, 3)),
        saved(Image.new("I;16", (1, 1), 300), "PNG", transparency=300),
        saved(Image.new("RGBA", (1, 1), (255, 0, 0, 0)), "WEBP", lossless=True, exact=True),
        saved(Image.new("1", (1, 1), 0), "PNG", transparency=0),
    ],
    ids=lambda image: f"{image.mode} {image.format}",
)
def test_what_is_transparent_is_white(image: Image.Image) -> None:
    assert as_shown(image).getpixel((0, 0)) == (255, 255, 255)
    shown = as_shown(image, keep_alpha=True)
    assert shown.mode == "RGBA" and shown.getpixel((0, 0))[3] == 0  # type: ignore[index]


def test_half_transparent_colours_are_mixed_with_white() -> None:
    assert as_shown(Image.new("RGBA", (1, 1), (255, 0, 0, 102))).getpixel((0, 0)) == (255, 153, 153)


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "PPM", None])
def test_images_with_16_bits_keep_their_shades(file_format: str | None) -> None:
    image = Image.fromarray(GREY_16)
    shown = as_shown(image if file_format is None else saved(image, file_format))
    assert shown.mode == "RGB" and np.array(shown)[..., 1].tolist() == GREY_8
    big_endian = Image.frombytes("I;16B", (3, 2), GREY_16.astype(">u2").tobytes())
    assert np.array(as_shown(big_endian))[..., 0].tolist() == GREY_8


@pytest.mark.parametrize(("mode", "white"), [("RGB", (255, 255, 255)), ("L", 255), ("I;16", 65535)])
def test_a_photo_is_shown_upright(mode: str, white: Any) -> None:
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    image = Image.new(mode, (6, 4))
    image.putpixel((0, 0), white)
    shown = as_shown(saved(image, "TIFF" if mode == "I;16" else "PNG", exif=turned))
    assert shown.size == (4, 6) and shown.getpixel((3, 0)) == (255, 255, 255)
    assert as_shown(shown).size == (4, 6)  # Once.


def test_broken_exif_data_has_no_effect() -> None:
    assert as_shown(saved(Image.new("RGB", (6, 4)), "JPEG", exif=b"Exif\0\0broken")).size == (6, 4)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_without_a_range_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"mode '{mode}', whose values have no fixed range; convert it to RGB"):
        as_shown(saved(Image.new(mode, (4, 3)), "TIFF"))
