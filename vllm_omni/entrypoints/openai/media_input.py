# SPDX-License-Identifier: Apache-2.0
"""Media of requests: vLLM's media connector, which fetches from allowed hosts only and checks media before decoding.

vLLM's own rules remain: `--allowed-media-domains`, `--allowed-local-media-path`, its time-outs and redirect switch.

- Addresses: the one that is connected to is checked, of every redirect too. So a host name that resolves to another
  address the next time (DNS rebinding) and an encoded address (decimal, octal, IPv4 within IPv6) are refused.
- Memory: what a part takes when it is decoded is taken of a budget before, by its header, see `media_budget.py`.
- Formats: FFmpeg opens every format that it recognizes. Some (playlists) name other files and hosts, and it depends on
  FFmpeg's build whether it opens them. So it gets only containers that hold their media themselves. Nor are images
  read that contain another image, whose size their header does not say.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import ipaddress
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import aiohttp
import av
import numpy as np
import pybase64
import soundfile
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from PIL import Image, UnidentifiedImageError
from vllm import envs
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.image import ALLOWED_IMAGE_FORMATS
from vllm.multimodal.media import (
    MEDIA_CONNECTOR_REGISTRY,
    AudioMediaIO,
    ImageMediaIO,
    MediaConnector,
    MediaWithBytes,
    VideoMediaIO,
)
from vllm.multimodal.media.base import MediaIO
from vllm.multimodal.video import VideoLoader
from vllm.multimodal.video_decoders import VideoSourceMetadata, VideoTargetMetadata

from vllm_omni.engine.images import OmniImageIO
from vllm_omni.entrypoints.openai.media_budget import MediaBudget, MediaShare
from vllm_omni.entrypoints.openai.request_context import RequestContext, TooMuchMediaError
from vllm_omni.entrypoints.openai.server_args import RequestLimits, ServerLimits, flag, limits_from
from vllm_omni.errors import OmniError

logger = logging.getLogger("vllm.omni.server")

CONNECTOR_NAME = "omni"

MIN_AUDIO_SECONDS = 0.025
"""The shortest sound that is read: a window of the models' spectrograms."""

SILENCE_RATE = 16_000
"""Samples a second of what is read as the sound of a video that has none."""

IMAGE_PIXEL_BYTES, FRAME_PIXEL_BYTES, SAMPLE_BYTES = 4, 3, 4
"""As Pillow, vLLM's readers of videos, and those of sounds keep them."""

_IMAGE_FORMATS = tuple({*ALLOWED_IMAGE_FORMATS} - {"BLP", "ICNS", "ICO", "IPTC"})
"""Without those that may contain another image, of any size."""

_FLAC = b"fLaC"
_FLAC_COUNT = 18
"""The offset of the 8 bytes of a FLAC file whose last 36 bits are its number of samples; 0: unknown."""

_BASE64 = ";base64,"
_MAX_DATA_HEADER = 1000
_URL_SAFE = bytes.maketrans(b"-_", b"+/")

_ID3 = b"ID3"
# The first bytes of a file, and their offset.
_CONTAINERS: tuple[tuple[int, bytes], ...] = (
    (0, b"RIFF"),  # WAV, AVI
    (0, b"RF64"),
    (0, _FLAC),
    (0, b"OggS"),  # Vorbis, Opus, Theora
    (0, b"\x1a\x45\xdf\xa3"),  # Matroska, WebM
    (0, b"FORM"),  # AIFF
    (0, b"caff"),
    (0, b".snd"),
    (0, b"#!AMR"),
    (0, b"FLV"),
    (0, b"GIF8"),
    (0, b"\x00\x00\x01\xba"),  # MPEG program stream
    (0, b"\x00\x00\x01\xb3"),
    (0, b"\x30\x26\xb2\x75"),  # ASF, WMV
    *((4, box) for box in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip")),  # MP4, QuickTime
)
_CONTAINER_NAMES = "WAV, MP3, FLAC, Ogg, AAC, MP4, WebM, Matroska, AVI, QuickTime, MPEG, AIFF, FLV, GIF, ..."


def install(args: argparse.Namespace) -> None:
    """Registers our connector with vLLM, at the program's start. A connector that the user chose stays."""
    connection = GuardedHTTPConnection(AddressGuard(args.allowed_media_domains or ()))
    limits, server = limits_from(args, RequestLimits), limits_from(args, ServerLimits)
    budget = MediaBudget(limits.max_decoded_bytes, server.max_total_decoded_bytes, server.max_client_decoded_bytes)
    make = partial(OmniMediaConnector, connection=connection, limits=limits, budget=budget)
    MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR_NAME)(make)
    chosen = os.environ.setdefault("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)
    if chosen != CONNECTOR_NAME:
        logger.warning("VLLM_MEDIA_CONNECTOR=%s fetches media: private addresses and sizes are not checked", chosen)


class OmniMediaConnector(MediaConnector):
    """Counts and checks every media part. A wrong one is the client's error, which names the part."""

    def __init__(self, *args: Any, limits: RequestLimits, budget: MediaBudget, **kwargs: Any) -> None:
        """Takes the arguments of `MediaConnector`, the limits of a request, and the server's budget."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._budget = budget

    def load_from_url(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        guarded, label = self._guard(url, media_io)
        with _client_errors(label, kind_of(media_io)):
            return super().load_from_url(url, guarded, fetch_timeout=fetch_timeout)

    async def load_from_url_async(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        context = RequestContext.current()
        if context.is_preprocessed(url):
            return None  # As in a request that names what vLLM has by its `uuid` alone.
        kept = context.kept_sounds.get(url)
        if kept is not None and isinstance(media_io, AudioMediaIO):  # It has passed the limits before.
            return await asyncio.to_thread(kept)
        guarded, label = self._guard(url, media_io)
        with _client_errors(label, kind_of(media_io)):
            if isinstance(file := context.kept_files.get(url, url), bytes):
                return await asyncio.to_thread(guarded.load_bytes, file)
            return await super().load_from_url_async(file, guarded, fetch_timeout=fetch_timeout)

    def _load_data_url(self, url: str, media_io: MediaIO[Any]) -> Any:
        """vLLM's reads no parameters of a type that contain a comma, as `video/webm;codecs=vp8,opus`."""
        end = url[:_MAX_DATA_HEADER].lower().find(_BASE64)
        if end < 0:
            raise ValueError("only base64 data URIs are read, data:TYPE;base64,DATA")
        return media_io.load_base64(url[5:end].partition(";")[0], url[end + len(_BASE64) :])

    def _guard(self, url: str, media_io: MediaIO[Any]) -> tuple[GuardedMediaIO, str]:
        context = RequestContext.current()
        context.num_media_parts += 1
        if context.num_media_parts > self._limits.max_media_parts:
            raise TooMuchMediaError(
                f"a request may have {self._limits.max_media_parts} images, audio clips and videos "
                f"({flag('max_media_parts')}), and this one has more",
                parameter="messages",
            )
        address = f"{url[:48]!r}{'...' if len(url) > 48 else ''}"
        label = f"media part {context.num_media_parts} of the request, {kind_of(media_io)} {address}"
        return GuardedMediaIO(media_io, self._limits, label, self._budget, context), label


@contextlib.contextmanager
def _client_errors(label: str, kind: str) -> Iterator[None]:
    """Errors of loading a part as answers for the client."""
    try:
        yield
    except VLLMUnprocessableEntityError as error:
        # vLLM's, for an error status of the host.
        raise VLLMUnprocessableEntityError(f"{label}: {error.args[0]}", parameter=f"{kind}_url") from error
    except VLLMValidationError as error:
        error.parameter = error.parameter or f"{kind}_url"  # Of an `AddressGuard`.
        raise
    except (VLLMClientError, OmniError):
        raise
    except (OSError, aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or "it took too long"
        raise VLLMUnprocessableEntityError(f"{label} cannot be fetched: {reason}", parameter=f"{kind}_url") from error
    except (ValueError, RuntimeError) as error:
        # RuntimeError: vLLM's, for a local file that is not allowed. NotImplementedError: data that is not base64.
        raise VLLMValidationError(f"{label}: {error}", parameter=f"{kind}_url") from error


def kind_of(media_io: MediaIO) -> str:
    """`image`, `audio` or `video`."""
    for media_type, kind in ((ImageMediaIO, "image"), (AudioMediaIO, "audio"), (VideoMediaIO, "video")):
        if isinstance(media_io, media_type):
            return kind
    raise TypeError(f"no media of a request is read by {type(media_io).__name__}")


class GuardedMediaIO(MediaIO[Any]):
    """vLLM's reader of one kind of media, after checks. Media that cannot be read is the client's error.

    Args:
        media_io: Reads media that has passed the checks.
        limits: Checked before decoding.
        label: Names the media in messages.
        budget: Of decoded media.
        context: Of the request.
        is_frame: Whether it reads the images of a video.
    """

    def __init__(
        self,
        media_io: MediaIO,
        limits: RequestLimits,
        label: str,
        budget: MediaBudget,
        context: RequestContext,
        is_frame: bool = False,
    ) -> None:
        self._media_io: MediaIO[Any] = media_io
        if isinstance(media_io, ImageMediaIO):
            self._media_io = OmniImageIO.from_vllm(media_io)
        self._limits = limits
        self._label = label
        self._budget = budget
        self._context = context
        self._is_frame = is_frame
        self._parameter = f"{kind_of(media_io)}_url"
        self._read = {"image": self._read_image, "audio": self._read_sound, "video": self._read_video}[
            kind_of(media_io)
        ]
        if isinstance(media_io, VideoMediaIO):
            loader: Any = type(media_io.video_loader)
            media_io.video_loader = _reporting(loader)()
            # A video may be a list of images.
            image_io = GuardedMediaIO(media_io.image_io, limits, label, budget, context, is_frame=True)
            media_io.image_io = image_io  # type: ignore[assignment]

    def get_max_bytes(self) -> int:
        own = self._media_io.get_max_bytes()
        return self._limits.max_media_bytes if own is None else min(own, self._limits.max_media_bytes)

    def load_bytes(self, data: bytes) -> Any:
        """
        Raises:
            VLLMValidationError: It is too large, of another kind, or broken.
        """
        self._check_num_bytes(len(data))
        with self._client_errors(), self._shared() as share:
            return self._read(data, share)

    def load_base64(self, media_type: str, data: str) -> Any:
        self._check_num_bytes(len(data) * 3 // 4)
        with self._client_errors():
            if media_type.lower() == "video/jpeg":
                with self._shared() as share:
                    return _counted(self._media_io.load_base64(media_type, data), share)
            decoded = decode_base64(data)
        return self.load_bytes(decoded)

    def load_file(self, filepath: Path) -> Any:
        with self._client_errors():
            if not filepath.is_file():  # Reading a pipe or a device might never end.
                raise ValueError("there is no such file")
            self._check_num_bytes(filepath.stat().st_size)
            data = filepath.read_bytes()
        return self.load_bytes(data)

    @contextlib.contextmanager
    def _client_errors(self) -> Iterator[None]:
        """Errors of reading the media as the client's."""
        try:
            yield
        except (VLLMClientError, OmniError, ImportError, MemoryError):
            raise
        except Exception as error:  # Decoders raise many types (SyntaxError, cv2.error, struct.error, ...).
            logger.debug("%s cannot be read", self._label, exc_info=True)
            raise self._refusal(f"cannot be read: {error}") from error

    def _refusal(self, reason: str) -> VLLMValidationError:
        return VLLMValidationError(f"{self._label} {reason}", parameter=self._parameter)

    def _check_num_bytes(self, num_bytes: int) -> None:
        limit = self.get_max_bytes()
        if num_bytes > limit:
            raise self._refusal(f"has more than {limit} bytes, which is the limit ({flag('max_media_bytes')})")

    def _check_seconds(self, seconds: float) -> None:
        if seconds < MIN_AUDIO_SECONDS:
            raise self._refusal(
                f"has {1000 * seconds:.0f} ms of sound; send at least {1000 * MIN_AUDIO_SECONDS:.0f} ms (a WAV file "
                "whose header says that it is empty has none)"
            )

    @contextlib.contextmanager
    def _shared(self) -> Iterator[MediaShare]:
        """A share of the budget, which is released if this block fails."""
        share = MediaShare(self._budget, self._context)
        try:
            yield share
        except BaseException:
            share.release()
            raise

    def _read_image(self, data: bytes, share: MediaShare) -> Any:
        try:
            header = Image.open(BytesIO(data), formats=_IMAGE_FORMATS)
        except UnidentifiedImageError:
            raise ValueError("it is in none of the known formats (PNG, JPEG, WebP, GIF, TIFF, ...)") from None
        with header as image:
            self._check_pixels(image, self._limits.max_image_pixels, "max_image_pixels")
            if not self._is_frame:
                self._count_tokens("image", 1, image)
            share.take(image.width * image.height * IMAGE_PIXEL_BYTES)
        image = self._media_io.load_bytes(data)
        share.release_with(image.media)
        return image

    def _read_sound(self, data: bytes, share: MediaShare) -> Any:
        check_container(data)
        if self._context.reads_sound_in_video and (seconds := seconds_of_silent_video(data)):
            self._check_video(data)  # Its seconds.
            share.take(round(seconds * SILENCE_RATE) * SAMPLE_BYTES)
            sound: tuple[np.ndarray, float] = np.zeros(round(seconds * SILENCE_RATE), np.float32), SILENCE_RATE
        else:
            sound = self._decode_sound(with_num_samples(data), share)
        self._check_seconds(len(sound[0]) / sound[1])
        share.take(sound[0].nbytes)
        share.release_with(sound[0])
        return sound

    def _decode_sound(self, data: bytes, share: MediaShare) -> tuple[np.ndarray, float]:
        try:
            info = soundfile.info(BytesIO(data))
            share.take(info.frames * info.channels * SAMPLE_BYTES)
            return self._media_io.load_bytes(data)
        except soundfile.LibsndfileError:
            return read_by_ffmpeg(data, share)

    def _read_video(self, data: bytes, share: MediaShare) -> Any:
        stream = self._check_video(data)
        if (whole := with_length(data)) is not data:
            stream = self._check_video(data := whole)

        def take(num_frames: int) -> None:
            self._count_tokens("video", num_frames, stream)
            share.take(num_frames * stream.width * stream.height * FRAME_PIXEL_BYTES)

        token = _on_sampling.set(take)
        try:
            video = self._media_io.load_bytes(data)
        finally:
            _on_sampling.reset(token)
        if not len(video.media[0]):
            take(1)
            video = MediaWithBytes(read_single_frame(data), data)
        return _counted(video, share)

    def _check_video(self, data: bytes) -> av.VideoStream:
        """Reads the header only."""
        check_container(data)
        with av.open(BytesIO(data), "r") as container:
            if not container.streams.video:
                raise ValueError("it has no video stream")
            stream = container.streams.video[0]
            self._check_pixels(stream, self._limits.max_video_pixels, "max_video_pixels")
            seconds = (container.duration or 0) / av.time_base
            if stream.duration and stream.time_base:
                seconds = max(seconds, float(stream.duration * stream.time_base))
        if seconds > self._limits.max_video_seconds:
            limit = f"{self._limits.max_video_seconds:g} s, which is the limit ({flag('max_video_seconds')})"
            raise self._refusal(f"lasts {seconds:.0f} s, more than {limit}")
        return stream

    def _count_tokens(
        self, kind: Literal["image", "video"], num_frames: int, size: Image.Image | av.VideoStream
    ) -> None:
        context = self._context
        if (tokens := context.media_tokens) is None:
            return
        num_tokens = tokens.count(kind, num_frames, size.height, size.width)
        context.num_media_tokens += num_tokens
        if context.num_media_tokens > tokens.max_tokens:
            raise TooMuchMediaError(
                f"the images and videos of this request have more than {tokens.max_tokens} tokens, which is the length "
                "of the model's context; send fewer or smaller images, or shorter videos",
                parameter="messages",
            )

    def _check_pixels(self, image: Image.Image | av.VideoStream, limit: int, name: str) -> None:
        if image.width * image.height > limit:
            size = f"{image.width}x{image.height}"
            raise self._refusal(f"is {size}, more than {limit} pixels, which is the limit ({flag(name)})")


_on_sampling: ContextVar[Callable[[int], None]] = ContextVar("on_sampling")


@functools.cache
def _reporting(loader: type[VideoLoader]) -> type[VideoLoader]:
    """A reader of videos of vLLM that reports how many frames it will decode, when it has read the header."""

    class Reporting(loader):  # type: ignore[valid-type, misc]
        @classmethod
        def compute_frames_index_to_sample(
            cls, source: VideoSourceMetadata, target: VideoTargetMetadata, **kwargs: Any
        ) -> list[int]:
            # vLLM's for models that read pairs of frames divides by zero.
            is_single = source.total_frames_num == 1
            indices = [0] if is_single else super().compute_frames_index_to_sample(source, target, **kwargs)
            _on_sampling.get()(len(indices))
            return indices

    return Reporting


def _counted(video: Any, share: MediaShare) -> Any:
    """A video that was read, whose frames' memory the share has from now on."""
    frames = video.media[0]
    share.take(frames.nbytes)
    share.release_with(frames)
    return video


def read_by_ffmpeg(data: bytes, share: MediaShare) -> tuple[np.ndarray, int]:
    """A sound of a format that libsndfile does not read: float32 `[samples]`, channels averaged, and its sample rate.

    vLLM's reader of these returns integers unscaled, and interleaved channels as one.

    Raises:
        ValueError: It has no sound, or more than vLLM's limits.
    """
    resampler = av.AudioResampler(format="fltp")
    pieces = [np.empty(0, np.float32)]
    with av.open(BytesIO(data), "r") as container:
        if not container.streams.audio:
            raise ValueError("it has no audio stream")
        stream = container.streams.audio[0]
        expected = int((container.duration or 0) / av.time_base * stream.rate) * stream.channels * SAMPLE_BYTES
        share.take(min(expected or envs.VLLM_MAX_AUDIO_DECODE_BYTES, envs.VLLM_MAX_AUDIO_DECODE_BYTES))
        seconds, num_bytes = 0.0, 0
        for frame in container.decode(stream):
            for piece in resampler.resample(frame):
                pieces.append(piece.to_ndarray().mean(axis=0))
                seconds += piece.samples / piece.sample_rate
                num_bytes += piece.samples * len(piece.layout.channels) * SAMPLE_BYTES
            for name, value, limit in (
                ("VLLM_MAX_AUDIO_DECODE_DURATION_S", seconds, envs.VLLM_MAX_AUDIO_DECODE_DURATION_S),
                ("VLLM_MAX_AUDIO_DECODE_BYTES", num_bytes, envs.VLLM_MAX_AUDIO_DECODE_BYTES),
            ):
                if value > limit:
                    raise ValueError(f"it has more sound than {name} allows ({limit})")
        return np.concatenate(pieces), stream.rate


def decode_base64(data: str) -> bytes:
    """base64 as browsers and shells write it: with line breaks, percent-encoded, in the alphabet for URLs, unpadded.

    Raises:
        ValueError: It is none.
    """
    text = (unquote(data) if "%" in data else data).encode("ascii").translate(_URL_SAFE, delete=b" \t\r\n")
    return pybase64.b64decode(text + b"=" * (-len(text) % 4), validate=True)


def with_length(data: bytes) -> bytes:
    """A video whose file does not say how long it is, as a browser's recorder writes it, in a file that does."""
    file = BytesIO()
    with av.open(BytesIO(data), "r") as source:
        stream = source.streams.video[0]
        if source.duration or stream.duration or stream.frames:
            return data
        with av.open(file, "w", format="matroska") as target:
            copy = target.add_stream_from_template(stream)
            for packet in source.demux(stream):
                if packet.size:
                    packet.stream = copy
                    target.mux(packet)
    return file.getvalue()


def seconds_of_silent_video(data: bytes) -> float:
    """The length of a video without sound; 0 of any other file."""
    with contextlib.suppress(av.FFmpegError), av.open(BytesIO(data), "r") as container:
        if container.streams.video and not container.streams.audio:
            stream = container.streams.video[0]
            length = stream.duration * stream.time_base if stream.duration and stream.time_base else 0
            return max(float(length), (container.duration or 0) / av.time_base, MIN_AUDIO_SECONDS)
    return 0.0


def with_num_samples(data: bytes) -> bytes:
    """A FLAC file that was written into a pipe, and does not say how long it is, as one that does."""
    at = _after_tags(data) + _FLAC_COUNT
    fields = int.from_bytes(data[at : at + 8])
    if data[at - _FLAC_COUNT :][:4] != _FLAC or fields & (1 << 36) - 1:
        return data
    with av.open(BytesIO(data), "r") as file:
        num_samples = sum(packet.duration or 0 for packet in file.demux(file.streams.audio[0]))
    return data[:at] + (fields | num_samples).to_bytes(8) + data[at + 8 :]


def read_single_frame(data: bytes) -> tuple[np.ndarray, dict[str, Any]]:
    """A video of one frame, of which vLLM reads none: uint8 `[1, height, width, 3]`, and vLLM's metadata.

    Raises:
        ValueError: It has none that can be decoded, or several.
    """
    with av.open(BytesIO(data), "r") as container:
        fps = float(container.streams.video[0].average_rate or 1)
        try:
            frames = list(itertools.islice(container.decode(video=0), 2))
        except av.FFmpegError:
            frames = []
    if len(frames) != 1:
        raise ValueError("none of its frames can be decoded")
    metadata = {
        "total_num_frames": 1,
        "fps": fps,
        "duration": 1 / fps,
        "video_backend": "pyav",
        "frames_indices": [0],
        "do_sample_frames": False,
    }
    return frames[0].to_ndarray(format="rgb24")[None], metadata


def check_container(data: bytes) -> None:
    """
    Raises:
        ValueError: It is not a file of a format that holds its audio and frames itself.
    """
    start = _after_tags(data)
    head = data[start : start + 16]
    is_known = any(head[at : at + len(mark)] == mark for at, mark in _CONTAINERS)
    # MP3 and AAC start with a frame, whose first 11 bits are set; an MPEG transport stream has packets of 188 bytes.
    is_frame = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0
    is_transport = head[:1] == b"G" and data[start + 188 : start + 189] == b"G"
    if not (is_known or is_frame or is_transport):
        raise ValueError(f"it is in none of the known formats ({_CONTAINER_NAMES})")


def _after_tags(data: bytes) -> int:
    """The offset after a file's ID3 tags, which FFmpeg skips to detect the format."""
    start = 0
    while data[start : start + 3] == _ID3 and len(data) >= start + 10:
        size = 0
        for byte in data[start + 6 : start + 10]:
            size = size << 7 | byte & 0x7F
        start += 10 + size
        while data[start : start + 1] == b"\0":  # Some writers do not count their padding.
            start += 1
    return start


class AddressGuard:
    """Decides which hosts are allowed: those in its list, at any address; without a list, all at public addresses."""

    def __init__(self, allowed_hosts: Iterable[str] = ()) -> None:
        self._allowed = frozenset(host.lower() for host in allowed_hosts)

    def check(self, host: str, addresses: Sequence[str]) -> None:
        """
        Raises:
            VLLMValidationError: Media may not be fetched from this host.
        """
        if self._allowed:
            if host.lower() not in self._allowed:
                raise VLLMValidationError(f"media is not fetched from {host}: not in --allowed-media-domains")
        elif not all(is_public(address) for address in addresses):
            raise VLLMValidationError(
                f"media is not fetched from {host}, which is not a public address; "
                "set --allowed-media-domains to allow it"
            )


def is_public(address: str) -> bool:
    """Whether an address, and any address wrapped in it, is a public one of the Internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])  # Without the zone: fe80::1%eth0.
    if isinstance(ip, ipaddress.IPv6Address):
        # Relays unwrap these.
        for inner in (ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())):
            if inner is not None:
                return is_public(str(inner)) and ip.teredo is None
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


class GuardedHTTPConnection(HTTPConnection):
    """vLLM's HTTP client, on a `GuardedConnector`. Without proxies, which would connect to unchecked addresses."""

    def __init__(self, guard: AddressGuard) -> None:
        super().__init__()
        self._guard = guard

    async def get_async_client(self) -> aiohttp.ClientSession:
        if self._async_client is None:
            self._async_client = aiohttp.ClientSession(connector=GuardedConnector(self._guard), trust_env=False)
        return self._async_client

    def get_sync_client(self) -> Any:
        raise NotImplementedError("a server fetches media on its event loop")

    async def close(self) -> None:
        """Closes all connections."""
        if self._async_client is not None:
            await self._async_client.close()
            self._async_client = None


class GuardedConnector(aiohttp.TCPConnector):
    """Checks the host of every request and every redirect."""

    def __init__(self, guard: AddressGuard) -> None:
        super().__init__(resolver=GuardedResolver(guard))
        self._guard = guard

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        host = req.url.host or ""
        # An address is not resolved, so it is checked here; the addresses of a name are checked by the resolver.
        self._guard.check(host, [host] if _is_address(host) else [])
        return await super().connect(req, traces, timeout)


class GuardedResolver(AbstractResolver):
    """Resolves names, and checks the addresses that are connected to."""

    def __init__(self, guard: AddressGuard) -> None:
        self._guard = guard
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        self._guard.check(host, [result["host"] for result in found])
        return found

    async def close(self) -> None:
        await self._resolver.close()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
