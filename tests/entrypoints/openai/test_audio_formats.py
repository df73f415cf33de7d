# SPDX-License-Identifier: Apache-2.0
"""Every audio format is checked by decoding what was written."""

import io
import struct
import wave

import av
import numpy as np
import pytest

from vllm_omni.entrypoints.openai.audio_formats import (
    AUDIO_FORMATS,
    WAV_UNKNOWN_SIZE,
    AudioEncoder,
    encode_audio,
    to_pcm16,
)

RATE = 24000
FILES = [name for name in AUDIO_FORMATS if not name.startswith("pcm")]
MAX_PADDING_S = {"mp3": 0.15, "aac": 0.15, "opus": 0.0}  # what a codec adds, where the file cannot say so


def tone(num_samples: int, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz / rate * np.arange(num_samples))).astype(np.float32)


def decode(data: bytes) -> tuple[np.ndarray, int]:
    """Samples in [-1, 1], and their rate."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray()[0] for frame in container.decode(audio=0)]
        rate = container.streams.audio[0].rate
    samples = np.concatenate(frames or [np.zeros(0, np.int16)])
    return (samples / 32768 if samples.dtype == np.int16 else samples), rate


def encode_in_pieces(samples: np.ndarray, format: str, rate: int = RATE, speed: float = 1.0, step: int = 1000) -> list:
    encoder = AudioEncoder(format, rate, speed)
    pieces = [encoder.encode(samples[start : start + step]) for start in range(0, len(samples), step)]
    return [*pieces, encoder.finish()]


def loudest_hertz(samples: np.ndarray, rate: int) -> float:
    return float(np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples))


@pytest.mark.parametrize("format", ["wav", "flac"])
def test_a_lossless_file_has_the_same_samples(format):
    samples = np.concatenate([tone(12345), [1.0, -1.0, 0.0]]).astype(np.float32)
    for data in (encode_audio(samples, format, RATE), b"".join(encode_in_pieces(samples, format))):
        decoded, rate = decode(data)
        assert rate == RATE
        assert decoded.shape == samples.shape
        assert np.abs(decoded - samples).max() <= 1 / 32768


@pytest.mark.parametrize("format", ["pcm", "pcm16"])
def test_pcm_is_the_samples_and_nothing_else(format):
    samples = tone(5000)
    whole = encode_audio(samples, format, RATE)
    assert whole == to_pcm16(samples).tobytes() == b"".join(encode_in_pieces(samples, format))
    assert np.abs(np.frombuffer(whole, "<i2") / 32768 - samples).max() <= 1 / 32768


@pytest.mark.parametrize("format", ["mp3", "aac", "opus"])
@pytest.mark.parametrize("rate", [24000, 44100, 11111])
def test_a_lossy_file_is_as_long_and_sounds_the_same(format, rate):
    samples = tone(rate, rate)
    for data in (encode_audio(samples, format, rate), b"".join(encode_in_pieces(samples, format, rate))):
        decoded, decoded_rate = decode(data)
        assert 1.0 <= len(decoded) / decoded_rate + 1e-3 <= 1.002 + MAX_PADDING_S[format]
        assert loudest_hertz(decoded, decoded_rate) == pytest.approx(440, abs=2)
        assert np.sqrt((decoded**2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


def test_an_mp3_file_says_how_much_of_it_is_padding():
    decoded, _ = decode(encode_audio(tone(30001), "mp3", RATE))
    assert len(decoded) == 30001


@pytest.mark.parametrize("format", AUDIO_FORMATS)
def test_a_listener_need_not_wait_for_the_end(format):
    pieces = encode_in_pieces(tone(RATE), format, step=2000)
    half = b"".join(pieces[: len(pieces) // 2])
    if format.startswith("pcm"):
        assert len(half) == 2 * 2000 * (len(pieces) // 2)
        return
    decoded, rate = decode(half)
    assert 0.3 <= len(decoded) / rate <= 0.5


def test_a_wav_header_says_the_length_where_it_is_known():
    samples = tone(777)
    with wave.open(io.BytesIO(encode_audio(samples, "wav", 16000))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()) == (1, 2, 16000, 777)
    streamed = b"".join(encode_in_pieces(samples, "wav"))
    assert streamed[:4] == b"RIFF" and struct.unpack("<I", streamed[40:44]) == (WAV_UNKNOWN_SIZE,)
    assert streamed[44:] == encode_audio(samples, "wav", RATE)[44:]


@pytest.mark.parametrize("format", AUDIO_FORMATS)
@pytest.mark.parametrize("num_samples", [0, 1, 100])
def test_next_to_nothing_is_a_file_too(format, num_samples):
    for data in (encode_audio(tone(num_samples), format, RATE), b"".join(encode_in_pieces(tone(num_samples), format))):
        if format.startswith("pcm"):
            assert len(data) == 2 * num_samples
        else:
            decoded, rate = decode(data)
            assert num_samples <= len(decoded) * RATE / rate <= 0.25 * RATE


@pytest.mark.parametrize("speed", [0.25, 0.7, 1.5, 4.0])
@pytest.mark.parametrize("format", ["wav", "opus"])
def test_speed_changes_the_length_and_not_the_pitch(format, speed):
    data = encode_audio(tone(2 * RATE), format, RATE, speed)
    decoded, rate = decode(data)
    assert len(decoded) / rate == pytest.approx(2 / speed, rel=0.03)
    assert loudest_hertz(decoded, rate) == pytest.approx(440, rel=0.02)
    assert decode(b"".join(encode_in_pieces(tone(2 * RATE), format, speed=speed)))[0].shape == decoded.shape


def test_what_is_too_loud_is_clipped():
    samples = np.array([2.0, -2.0, 1.0], np.float32)
    assert np.frombuffer(encode_audio(samples, "pcm", RATE), "<i2").tolist() == [32767, -32768, 32767]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", ["pcm", "mp3"])
def test_samples_that_are_not_numbers_are_refused(format, value):
    with pytest.raises(ValueError, match="not numbers"):
        encode_audio(np.array([0.0, value], np.float32), format, RATE)


@pytest.mark.parametrize("format", ["ogg", "MP3", ""])
def test_an_unknown_format_is_refused_with_the_known_ones(format):
    with pytest.raises(ValueError, match=r"unknown audio format .*wav, mp3, flac, opus, aac, pcm"):
        AudioEncoder(format, RATE)


@pytest.mark.parametrize("speed", [0.2, 4.1, 0.0, float("nan")])
def test_a_speed_out_of_bounds_is_refused(speed):
    with pytest.raises(ValueError, match=r"speed must be between 0\.25 and 4\.0"):
        AudioEncoder("wav", RATE, speed)
