# SPDX-License-Identifier: Apache-2.0
"""Streamed speech, read from a socket chunk by chunk, as players in browsers and other servers read it."""

import http.client
import io
import json
import struct
import wave
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.entrypoints.fake_pipelines import running
from tests.entrypoints.openai.audio_stage import AUDIO_STAGE, NUM_SAMPLES, RATE, piece
from tests.entrypoints.openai.fake_server import FakeServer, over_http
from tests.entrypoints.openai.test_audio_formats import decode
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.audio_formats import to_pcm16

OPUS_RATE = 48_000  # Of the granule positions of every Opus file.


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        running(AsyncOmniLLM, tmp_path_factory.mktemp("config"), [AUDIO_STAGE]) as llm,
        over_http(FakeServer(llm).app) as url,
    ):
        yield url


def chunks_of(url: str, text: str, response_format: str, **fields: object) -> list[bytes]:
    """The chunks of HTTP in which an answer is sent; of one that is not streamed there is one."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    body = json.dumps({"input": text, "response_format": response_format, **fields})
    connection.request("POST", "/v1/audio/speech", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    if not response.chunked:
        return [response.read()]
    chunks = []
    # http.client joins the chunks, so they are read here.
    while size := int(response.fp.readline(), 16):
        chunks.append(response.fp.read(size))
        response.fp.readline()
    connection.close()
    return chunks


def test_the_first_chunk_of_wav_has_the_whole_header(url: str) -> None:
    first, *rest = chunks_of(url, "3 pieces", "wav")
    with wave.open(io.BytesIO(first)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
    assert len(first) >= 44 and len(rest) > 1
    assert all(len(chunk) % 2 == 0 for chunk in (first, *rest))  # No sample is divided.
    expected = np.concatenate([piece(index).numpy() for index in range(3)])
    assert b"".join([first, *rest])[44:] == to_pcm16(expected).tobytes()


@pytest.mark.parametrize("stream", [True, False])
def test_mp3_answers_can_be_joined(url: str, stream: bool) -> None:
    answers = [b"".join(chunks_of(url, text, "mp3", stream=stream)) for text in ("8 pieces", "12 pieces")]
    one, other = (decode(answer)[0] for answer in answers)
    joined, rate = decode(b"".join(answers))
    assert rate == RATE
    # A decoder may play the encoder's padding between the two, and the frame with the length of a whole file.
    assert 0 <= len(joined) - len(one) - len(other) <= 0.2 * RATE
    # Both sounds are in it, one after the other: each near its place is what it is alone.
    for sound, start in ((one, 0), (other, len(joined) - len(other))):
        middle = sound[len(sound) // 4 : -len(sound) // 4]
        around = joined[start : start + len(sound)]
        assert best_match(around, middle) > 0.99


def best_match(sound: np.ndarray, part: np.ndarray) -> float:
    """The highest correlation of a part with the same number of samples of a sound."""
    size = 2 ** int(np.ceil(np.log2(len(sound) + len(part))))
    products = np.fft.irfft(np.fft.rfft(sound, size) * np.conj(np.fft.rfft(part, size)), size)
    products = products[: len(sound) - len(part) + 1]
    energies = np.convolve(sound**2, np.ones(len(part)), "valid")
    return float((products / np.sqrt(np.maximum(energies, 1e-9) * (part**2).sum())).max())


class OggPage(NamedTuple):
    flags: int
    granule: int
    number: int
    packets: list[bytes]


def ogg_pages(data: bytes) -> list[OggPage]:
    """The pages of whole packets that `data` consists of; each has the right checksum."""
    pages = []
    while data:
        magic, version, flags, granule, _, number, checksum, num_segments = struct.unpack("<4sBBqIIIB", data[:27])
        assert (magic, version) == (b"OggS", 0)
        lengths = data[27 : 27 + num_segments]
        start, size = 27 + num_segments, 27 + num_segments + sum(lengths)
        assert len(data) >= size and lengths[-1] < 255
        assert ogg_checksum(data[:22] + bytes(4) + data[26:size]) == checksum
        packets = [b""]
        for length in lengths:
            packets[-1] += data[start : start + length]
            start += length
            packets += [b""] if length < 255 else []
        pages.append(OggPage(flags, granule, number, packets[:-1]))
        data = data[size:]
    return pages


def ogg_checksum(data: bytes) -> int:
    """RFC 3533."""
    value = 0
    for byte in data:
        value ^= byte << 24
        for _ in range(8):
            value = (value << 1) ^ (0x104C11DB7 if value & 0x80000000 else 0)
    return value


def test_an_opus_stream_is_whole_pages(url: str) -> None:
    chunks = chunks_of(url, "8 pieces", "opus")
    pages = [ogg_pages(chunk) for chunk in chunks]  # A chunk ends where a page does.
    head, tags, *rest = [page for chunk in pages for page in chunk]
    assert head.flags == 2 and len(head.packets) == 1 and head.packets[0].startswith(b"OpusHead")  # It begins.
    assert tags.flags == 0 and len(tags.packets) == 1 and tags.packets[0].startswith(b"OpusTags")
    assert [page.number for page in (head, tags, *rest)] == list(range(len(rest) + 2))
    assert {page.flags for page in rest[:-1]} == {0} and rest[-1].flags == 4  # It ends.
    granules = [page.granule for page in rest]
    assert granules == sorted(granules)
    pre_skip = struct.unpack("<H", head.packets[0][10:12])[0]
    assert (granules[-1] - pre_skip) / OPUS_RATE == pytest.approx(8 * NUM_SAMPLES / RATE, abs=0.02)  # A packet.


def test_an_opus_stream_is_played_as_it_arrives(url: str) -> None:
    received, lengths = b"", []
    for chunk in chunks_of(url, "8 pieces", "opus"):
        received += chunk
        lengths.append(decode(received)[0].size)
    assert lengths == sorted(lengths) and len(set(lengths)) > 4
    assert lengths[-1] / OPUS_RATE == pytest.approx(8 * NUM_SAMPLES / RATE, abs=0.03)
