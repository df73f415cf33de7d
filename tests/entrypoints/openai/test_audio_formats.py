# SPDX-License-Identifier: Apache-2.0
"""Every audio format, checked by decoding the file."""

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
    BrokenAudioError,
    count_channels,
    encode_audio,
    to_pcm16,
)

RATE = 24000
FILES = [name for name in AUDIO_FORMATS if not name.startswith("pcm")]
MAX_PADDING_S = {"mp3": 0.15, "aac": 0.15, "opus": 0.0}  # padding of a codec whose files have no field for it


def tone(num_samples: int, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz / rate * np.arange(num_samples))).astype(np.float32)


def decode(data: bytes) -> tuple[np.ndarray, int]:
    """Samples in [-1, 1], and their rate: `[n]`, or `[channels, n]` for several channels."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray() for frame in container.decode(stream)]
        rate, num_channels, is_planar = stream.rate, stream.channels, stream.format.is_planar
    samples = np.concatenate(frames or [np.zeros((1, 0), np.int16)], axis=1)
    samples = samples if is_planar else samples.reshape(-1, num_channels).T
    samples = samples / 32768 if samples.dtype == np.int16 else samples
    return (samples[0] if num_channels == 1 else samples), rate


def encode_in_pieces(samples: np.ndarray, format: str, rate: int = RATE, speed: float = 1.0, step: int = 1000) -> list:
    encoder = AudioEncoder(format, rate, speed, num_channels=count_channels(samples))
    pieces = [encoder.encode(samples[..., start : start + step]) for start in range(0, samples.shape[-1], step)]
    return [*pieces, encoder.finish()]


def loudest_hertz(samples: np.ndarray, rate: int) -> float:
    return float(np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples))


def stereo(num_samples: int, rate: int = RATE) -> np.ndarray:
    """float32 `[2, n]`; no sample of one channel is that of the other but the first."""
    return np.stack([tone(num_samples, rate, 440.0), -tone(num_samples, rate, 660.0)])


@pytest.mark.parametrize("format", ["wav", "flac"])
@pytest.mark.parametrize("make", [tone, stereo])
def test_a_lossless_file_has_the_same_samples(format, make):
    samples = make(12345)
    samples[..., :3] = 1.0, -1.0, 0.0
    for data in (encode_audio(samples, format, RATE), b"".join(encode_in_pieces(samples, format))):
        decoded, rate = decode(data)
        assert rate == RATE
        assert decoded.shape == samples.shape
        assert np.abs(decoded - samples).max() <= 1 / 32768


@pytest.mark.parametrize("format", ["pcm", "pcm16"])
@pytest.mark.parametrize("make", [tone, stereo])
def test_pcm_has_no_header_and_interleaves_channels(format, make):
    samples = make(5000)
    whole = encode_audio(samples, format, RATE)
    assert whole == to_pcm16(samples).tobytes() == b"".join(encode_in_pieces(samples, format))
    decoded = np.frombuffer(whole, "<i2").reshape(-1, count_channels(samples)).T.reshape(samples.shape)
    assert np.abs(decoded / 32768 - samples).max() <= 1 / 32768


@pytest.mark.parametrize("format", ["mp3", "aac", "opus"])
@pytest.mark.parametrize("rate", [24000, 44100, 11111])
def test_a_lossy_file_has_the_same_length_and_pitch(format, rate):
    samples = tone(rate, rate)
    for data in (encode_audio(samples, format, rate), b"".join(encode_in_pieces(samples, format, rate))):
        decoded, decoded_rate = decode(data)
        assert 1.0 <= len(decoded) / decoded_rate + 1e-3 <= 1.002 + MAX_PADDING_S[format]
        assert loudest_hertz(decoded, decoded_rate) == pytest.approx(440, abs=2)
        assert np.sqrt((decoded**2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


def test_an_mp3_file_has_the_length_of_its_padding():
    decoded, _ = decode(encode_audio(tone(30001), "mp3", RATE))
    assert len(decoded) == 30001


@pytest.mark.parametrize("format", AUDIO_FORMATS)
def test_a_streaming_client_gets_audio_before_the_end(format):
    pieces = encode_in_pieces(tone(RATE), format, step=2000)
    half = b"".join(pieces[: len(pieces) // 2])
    if format.startswith("pcm"):
        assert len(half) == 2 * 2000 * (len(pieces) // 2)
        return
    decoded, rate = decode(half)
    assert 0.3 <= len(decoded) / rate <= 0.5


def test_a_wav_header_has_the_length_if_it_is_known():
    samples = tone(777)
    with wave.open(io.BytesIO(encode_audio(samples, "wav", 16000))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()) == (1, 2, 16000, 777)
    streamed = b"".join(encode_in_pieces(samples, "wav"))
    assert streamed[:4] == b"RIFF" and struct.unpack("<I", streamed[40:44]) == (WAV_UNKNOWN_SIZE,)
    assert streamed[44:] == encode_audio(samples, "wav", RATE)[44:]


@pytest.mark.parametrize("format", AUDIO_FORMATS)
@pytest.mark.parametrize("num_samples", [0, 1, 100])
def test_a_very_short_clip_is_a_file(format, num_samples):
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


@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_a_file_has_the_rate_that_is_chosen(format, rate, num_channels):
    samples = np.stack([tone(RATE)] * num_channels)
    encoder = AudioEncoder(format, RATE, num_channels=num_channels, file_rate=rate)
    decoded, decoded_rate = decode(encoder.encode(samples) + encoder.finish())
    if format == "opus":  # It has no rates between 24 and 48 kHz, and is always decoded at 48 kHz.
        assert encoder.sample_rate == {22050: 24000, 44100: 48000}.get(rate, rate)
    else:
        assert encoder.sample_rate == decoded_rate == rate
    decoded = np.atleast_2d(decoded)
    assert len(decoded) == encoder.num_channels == num_channels
    num_padding = 2 * 1152 if format in ("mp3", "aac") else 0  # two frames
    assert -1e-3 <= decoded.shape[1] / decoded_rate - 1.0 <= num_padding / rate + 1e-3
    assert loudest_hertz(decoded[0], decoded_rate) == pytest.approx(440, abs=2)


@pytest.mark.parametrize("rate", [8000, 22050, 48000])
@pytest.mark.parametrize("step", [3, 480, 1111])
def test_another_rate_is_continuous(rate, step):
    """The pieces of a stream are, bit for bit, those of the whole."""
    samples = tone(6000) + tone(6000, hertz=3000.0)
    results = []
    for size in (step, samples.size):
        encoder = AudioEncoder("pcm", RATE, file_rate=rate)
        parts = [encoder.encode(samples[start : start + size]) for start in range(0, samples.size, size)]
        results.append(b"".join([*parts, encoder.finish()]))
    assert results[0] == results[1]
    assert len(results[0]) // 2 == pytest.approx(samples.size * rate / RATE, abs=2)


def test_a_lower_rate_has_no_tones_that_it_cannot_hold():
    encoder = AudioEncoder("pcm", RATE, file_rate=8000)
    low, high = (
        np.frombuffer(encoder.encode(tone(RATE, hertz=hertz)), "<i2").astype(float) for hertz in (1000.0, 6000.0)
    )
    assert high[500:].std() < low.std() / 300


def test_the_volume_is_changed_and_clipped():
    samples = tone(5000)
    for volume in (0.0, 0.5, 1.0, 1.5, 4.0):
        encoder = AudioEncoder("pcm", RATE, volume=volume)
        expected = to_pcm16(np.clip(samples * np.float32(volume), -1.0, 1.0)).tobytes()
        assert encoder.encode(samples) + encoder.finish() == expected


def test_samples_are_clipped():
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


@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize(("rate", "speed"), [(48000, 1.0), (11111, 1.0), (24000, 2.0)])
def test_stereo_stays_stereo(format, rate, speed):
    samples = stereo(2 * rate, rate)
    for data in (encode_audio(samples, format, rate, speed), b"".join(encode_in_pieces(samples, format, rate, speed))):
        decoded, decoded_rate = decode(data)
        assert len(decoded) == 2
        assert decoded.shape[1] / decoded_rate == pytest.approx(2 / speed, abs=0.2)
        left, right = (loudest_hertz(channel, decoded_rate) for channel in decoded)
        assert (left, right) == (pytest.approx(440, rel=0.02), pytest.approx(660, rel=0.02))


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(BrokenAudioError, match="6 channels"):
        encode_audio(np.zeros((6, 10), np.float32), "wav", RATE)
    with pytest.raises(BrokenAudioError, match="2 channels after 1"):
        AudioEncoder("wav", RATE).encode(stereo(10))
