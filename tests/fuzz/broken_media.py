# SPDX-License-Identifier: Apache-2.0
"""Files that are no valid image, audio or video, or that a server should not decode. Knows no request."""

import io
import random
import struct
import wave
import zlib
from collections.abc import Callable
from functools import cache

import av
import numpy as np
from PIL import Image

from vllm_omni.testing.media import make_audio, make_image, make_video

Maker = Callable[[random.Random], bytes]


@cache
def image_file(format: str) -> bytes:
    buffer = io.BytesIO()
    make_image(0, 64, 48).save(buffer, format)
    return buffer.getvalue()


@cache
def audio_file(format: str) -> bytes:
    """A second of audio."""
    samples = np.rint(make_audio(0, 1.0) * 32767).astype("<i2")
    buffer = io.BytesIO()
    if format == "wav":
        with wave.open(buffer, "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(samples.tobytes())
        return buffer.getvalue()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream({"mp3": "libmp3lame", "flac": "flac"}[format], rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = 16_000
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    return buffer.getvalue()


@cache
def video(num_frames: int = 4) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for pixels in make_video(0, num_frames, 64, 48):
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def png(width: int, height: int, data: bytes = b"", more: bytes = b"") -> bytes:
    """A PNG file with a header of this size, independent of its pixels."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + _chunk(b"IDAT", zlib.compress(data)) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@cache
def _bomb() -> bytes:
    """36 megapixels of one colour in 100 KB; more than the server's limit."""
    return png(6000, 6000, bytes((6000 * 3 + 1) * 6000))


@cache
def _text_bomb() -> bytes:
    """An image with a compressed comment of 50 MB."""
    comment = b"Comment\0\0" + zlib.compress(bytes(50 << 20))
    return png(8, 8, bytes(25 * 8), _chunk(b"zTXt", comment))


def _truncated(whole: bytes, least: int = 1) -> Maker:
    return lambda rng: whole[: rng.randrange(least, max(least + 1, len(whole) // 3))]


def _garbage(head: bytes) -> Maker:
    return lambda rng: head + rng.randbytes(rng.randrange(1, 4000))


def _wav(riff: int, rate: int, channels: int, bits: int, data: int) -> bytes:
    form = struct.pack("<IHHIIHH", 16, 1, channels, rate, (rate * 2) % 2**32, 2, bits)
    return b"RIFF" + struct.pack("<I", riff) + b"WAVEfmt " + form + b"data" + struct.pack("<I", data) + bytes(64)


def _huge_video() -> bytes:
    """A video with a container header of 65520x65520 pixels and smaller frames."""
    data = bytearray(video())
    for box, at in ((b"mp4v", 28), (b"tkhd", 80)):
        start = data.index(box)
        step = ">HH" if box == b"mp4v" else ">II"
        values = (65520, 65520) if box == b"mp4v" else (65520 << 16, 65520 << 16)
        struct.pack_into(step, data, start + at, *values)
    return bytes(data)


BROKEN_IMAGES: dict[str, Maker] = {
    "empty image": lambda rng: b"",
    "noise as image": _garbage(b""),
    "cut PNG": lambda rng: image_file("PNG")[: rng.randrange(1, 60)],
    "cut GIF": lambda rng: image_file("GIF")[: rng.randrange(1, 20)],
    "JPEG of noise": _garbage(b"\xff\xd8\xff\xe0"),
    "PNG of noise": _garbage(b"\x89PNG\r\n\x1a\n"),
    "WebP of noise": _garbage(b"RIFF\xff\xff\xff\x7fWEBPVP8 "),
    "TIFF of noise": _garbage(b"II*\0"),
    "PNG of huge size": lambda rng: png(rng.choice([2**31 - 1, 200_000]), rng.choice([2**31 - 1, 200_000])),
    "PNG of size 0": lambda rng: png(0, rng.choice([0, 5])),
    "PNG bomb": lambda rng: _bomb(),
    "comment bomb": lambda rng: _text_bomb(),
    "audio as image": lambda rng: audio_file("wav"),
    "SVG": lambda rng: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "PostScript": lambda rng: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
}

BROKEN_AUDIO: dict[str, Maker] = {
    "empty audio": lambda rng: b"",
    "noise as audio": _garbage(b"\0"),
    "cut WAV": lambda rng: audio_file("wav")[: rng.randrange(1, 44)],
    "cut MP3": lambda rng: audio_file("mp3")[: rng.randrange(1, 40)],
    "cut FLAC": lambda rng: audio_file("flac")[: rng.randrange(1, 40)],
    "WAV of no channels": lambda rng: _wav(100, 16_000, 0, 16, 64),
    "WAV of no rate": lambda rng: _wav(100, 0, 1, 16, 64),
    "Ogg of noise": _garbage(b"OggS"),
    "FLAC of noise": _garbage(b"fLaC"),
    "playlist": lambda rng: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "concat list": lambda rng: b"ffconcat version 1.0\nfile /etc/passwd\n",
    "image as audio": lambda rng: image_file("PNG"),
}

BROKEN_VIDEOS: dict[str, Maker] = {
    "empty video": lambda rng: b"",
    "noise as video": _garbage(b"\0"),
    "cut MP4": _truncated(video()),
    "MP4 of noise": _garbage(b"\0\0\0\x18ftypmp42"),
    "WebM of noise": _garbage(b"\x1a\x45\xdf\xa3"),
    "audio as video": lambda rng: audio_file("wav"),
}

# Files that some decoders read and others refuse.
DOUBTFUL: dict[str, Maker] = {
    "MP4 of huge size": lambda rng: _huge_video(),
    "PNG with a wrong byte": lambda rng: _with_a_wrong_byte(image_file("PNG"), rng),
    "JPEG with a wrong byte": lambda rng: _with_a_wrong_byte(image_file("JPEG"), rng),
    "half a JPEG": lambda rng: image_file("JPEG")[: len(image_file("JPEG")) // 2],
    "WAV of huge rate": lambda rng: _wav(2**32 - 1, 2**32 - 1, 65535, 65535, 2**32 - 1),
    "WAV with a wrong byte": lambda rng: _with_a_wrong_byte(audio_file("wav"), rng, 60),
    "MP3 with a wrong byte": lambda rng: _with_a_wrong_byte(audio_file("mp3"), rng),
    "FLAC with a wrong byte": lambda rng: _with_a_wrong_byte(audio_file("flac"), rng),
    "MP4 with a wrong byte": lambda rng: _with_a_wrong_byte(video(), rng),
}


@cache
def _image_of_mode(mode: str, format: str, orientation: int | None = None) -> bytes:
    image = make_image(0, 64, 48).convert("L" if mode.startswith("I") else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image, dtype=np.uint16) * 257)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, format, exif=exif)
    return buffer.getvalue()


ODD_IMAGES: dict[str, Maker] = {
    "screenshot with alpha": lambda rng: _image_of_mode("RGBA", rng.choice(["PNG", "WEBP"])),
    "grey with alpha": lambda rng: _image_of_mode("LA", "PNG"),
    "palette": lambda rng: _image_of_mode("P", rng.choice(["PNG", "GIF"])),
    "16-bit grey": lambda rng: _image_of_mode("I;16", rng.choice(["PNG", "TIFF"])),
    "one bit": lambda rng: _image_of_mode("1", "PNG"),
    "print colours": lambda rng: _image_of_mode("CMYK", rng.choice(["JPEG", "TIFF"])),
    "photo on its side": lambda rng: _image_of_mode("RGB", "JPEG", rng.randrange(1, 9)),
    "image of one pixel": lambda rng: png(1, 1, zlib.compress(bytes(4))),
}
"""Valid images that are not plain RGB."""

ODD_SOUNDS: dict[str, Maker] = {
    "clip of a millisecond": lambda rng: _wav_of(16),
    "clip without samples": lambda rng: _wav_of(0),
    "stereo of 8 kHz": lambda rng: _wav_of(8000, 8000, 2),
}
"""Valid sounds that models may not take."""


def _wav_of(num_frames: int, rate: int = 16_000, num_channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((num_channels, 2, rate, 0, "NONE", ""))
        file.writeframes(bytes(2 * num_channels * num_frames))
    return buffer.getvalue()


def _with_a_wrong_byte(whole: bytes, rng: random.Random, before: int | None = None) -> bytes:
    data = bytearray(whole)
    data[rng.randrange(before or len(data))] ^= rng.randrange(1, 256)
    return bytes(data)


def doubtful_image(rng: random.Random) -> tuple[str, bytes]:
    name = rng.choice([name for name in DOUBTFUL if name.split()[-1] == "JPEG" or name.split()[0] in ("PNG", "JPEG")])
    return name, DOUBTFUL[name](rng)
