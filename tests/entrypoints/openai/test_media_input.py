# SPDX-License-Identifier: Apache-2.0
"""Media as clients write them: what a server reads of data URIs. Needs no model."""

import base64
import io
import wave
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai import request_context
from vllm_omni.entrypoints.openai.audio_formats import AudioEncoder, encode_audio
from vllm_omni.entrypoints.openai.media_budget import MediaBudget
from vllm_omni.entrypoints.openai.media_input import AddressGuard, GuardedHTTPConnection, OmniMediaConnector
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.server_args import RequestLimits


@pytest.fixture
def connector() -> Iterator[OmniMediaConnector]:
    """In a request; tests of other files run outside of one."""
    token = request_context._current.set(RequestContext())
    yield OmniMediaConnector(
        connection=GuardedHTTPConnection(AddressGuard()), limits=RequestLimits(), budget=MediaBudget(1 << 30, 1 << 30)
    )
    request_context._current.reset(token)


def image_file(mode: str = "RGB", colour: Any = (250, 3, 255)) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (8, 6), colour).save(file, "PNG")
    return file.getvalue()


def wav_file(num_samples: int, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes(bytes(2 * num_samples))
    return file.getvalue()


def video_file(num_frames: int, container_format: str = "webm", **options: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container_format, options=options) as container:
        stream = container.add_stream("libvpx" if container_format == "webm" else "mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(num_frames):
            pixels = np.full((48, 64, 3), 40 * i, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def wrapped(data: bytes) -> str:
    """As the program base64 writes it."""
    return base64.encodebytes(data).decode().replace("\n", "\r\n")


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{encode(image_file())}",
        f"data:image/png;base64,{wrapped(image_file())}",
        f"data:image/png;base64,{encode(image_file()).rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(image_file()).decode()}",
        f"data:image/png;base64,{encode(image_file()).replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        f"data:;base64,{encode(image_file())}",
        f"DATA:image/PNG;charset=utf-8;BASE64,{encode(image_file())}",
        f"data:image/png;name=a,b.png;base64,{encode(image_file())}",
    ],
    ids=["plain", "lines", "unpadded", "url-safe", "percent", "no type", "upper case", "comma"],
)
def test_every_form_of_a_data_uri_is_read(connector: OmniMediaConnector, url: str) -> None:
    image: Any = connector.fetch_image(url)
    assert (image.size, image.mode, image.media.getpixel((0, 0))) == ((8, 6), "RGB", (250, 3, 255))


@pytest.mark.parametrize(
    "url", ["data:,", "data:image/png,abc", "data:image/png;base64,%%%", "data:image/png;base64,é"]
)
def test_other_data_uris_are_refused(connector: OmniMediaConnector, url: str) -> None:
    with pytest.raises(VLLMValidationError, match="media part 1 of the request, image"):
        connector.fetch_image(url)


def test_a_grey_image_of_16_bits_keeps_its_shade(connector: OmniMediaConnector) -> None:
    image: Any = connector.fetch_image(f"data:image/png;base64,{encode(image_file('I;16', 100 * 257))}")
    assert image.media.getpixel((0, 0)) == (100, 100, 100)


@pytest.mark.parametrize("num_frames", [1, 2, 5])
@pytest.mark.parametrize(("container_format", "options"), [("webm", {}), ("webm", {"live": "1"}), ("mp4", {})])
def test_recorders_videos_of_any_length_are_read(
    connector: OmniMediaConnector, container_format: str, options: dict[str, str], num_frames: int
) -> None:
    data = encode(video_file(num_frames, container_format, **options))
    url = f"data:video/{container_format};codecs=vp8,opus;base64,{data}"
    video: Any = connector.fetch_video(url)
    frames, metadata = video.media
    assert frames.shape == (num_frames, 48, 64, 3) and frames.dtype == np.uint8
    assert metadata["total_num_frames"] == num_frames and metadata["duration"] > 0


@pytest.mark.parametrize("num_samples", [0, 1, 160, 399])
def test_sound_that_is_too_short_is_refused(connector: OmniMediaConnector, num_samples: int) -> None:
    url = f"data:audio/wav;base64,{encode(wav_file(num_samples))}"
    with pytest.raises(VLLMValidationError, match=r"has \d+ ms of sound; send at least 25 ms") as refused:
        connector.fetch_audio(url)
    assert refused.value.parameter == "audio_url"


def test_a_wav_file_without_a_length_is_refused_with_the_reason(connector: OmniMediaConnector) -> None:
    data = bytearray(wav_file(1600))
    data[40:44] = bytes(4)
    with pytest.raises(VLLMValidationError, match="whose header says that it is empty"):
        connector.fetch_audio(f"data:audio/wav;base64,{encode(bytes(data))}")
    samples, rate = connector.fetch_audio(f"data:audio/wav;base64,{encode(wav_file(400))}")
    assert (len(samples), rate) == (400, 16_000)


def by_ffmpeg(samples: np.ndarray) -> bytes:
    """As it writes into a pipe."""
    pieces: list[bytes] = []
    with av.open(SimpleNamespace(write=lambda data: pieces.append(bytes(data))), "w", format="flac") as container:
        stream = container.add_stream("flac", rate=16_000, layout="mono")
        stream.codec_context.format = "s16"
        frame = av.AudioFrame.from_ndarray((samples * 32768).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = 16_000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return b"".join(pieces)


def by_us(samples: np.ndarray) -> bytes:
    encoder = AudioEncoder("flac", 16_000)
    return b"".join([*(encoder.encode(piece) for piece in np.array_split(samples, 5)), encoder.finish()])


@pytest.mark.parametrize("encode_sound", [by_us, by_ffmpeg])
def test_flac_without_a_length_is_read_like_any_other(
    connector: OmniMediaConnector, monkeypatch: pytest.MonkeyPatch, encode_sound: Callable[[np.ndarray], bytes]
) -> None:
    samples = (np.random.default_rng(0).integers(-9000, 9000, 24_000) / 32768).astype(np.float32)
    streamed = f"data:audio/flac;base64,{encode(encode_sound(samples))}"
    whole = f"data:audio/flac;base64,{encode(encode_audio(samples, 'flac', 16_000))}"
    found, rate = connector.fetch_audio(streamed)
    expected, _ = connector.fetch_audio(whole)
    assert rate == 16_000 and np.array_equal(found, expected) and np.array_equal(expected, samples)
    tagged = b"ID3\x04\x00\x00\x00\x00\x00\x00" + encode_sound(samples)
    assert np.array_equal(connector.fetch_audio(f"data:audio/flac;base64,{encode(tagged)}")[0], samples)
    monkeypatch.setenv("VLLM_MAX_AUDIO_DECODE_DURATION_S", "1")
    with pytest.raises(VLLMValidationError, match="VLLM_MAX_AUDIO_DECODE_DURATION_S"):
        connector.fetch_audio(streamed)


@pytest.mark.parametrize("codec", ["pcm_s16le", "flac", "aac"])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_sound_in_a_container_of_videos_has_its_loudness_and_length(
    connector: OmniMediaConnector, codec: str, num_channels: int
) -> None:
    rate = 16_000
    tone = (9000 * np.sin(2 * np.pi * 300 * np.arange(rate) / rate)).astype(np.int16)
    file, layout = io.BytesIO(), "mono" if num_channels == 1 else "stereo"
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.repeat(tone, num_channels)[None], format="s16", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    samples, found_rate = connector.fetch_audio(f"data:video/x-matroska;base64,{encode(file.getvalue())}")
    assert found_rate == rate and abs(len(samples) - rate) <= 2048, "AAC has whole frames"
    assert np.abs(samples).max() == pytest.approx(9000 / 32768, rel=0.2)
