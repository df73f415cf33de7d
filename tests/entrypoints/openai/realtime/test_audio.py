# SPDX-License-Identifier: Apache-2.0
"""Formats of sound: G.711 against FFmpeg's, resampled and faster output."""

import av
import numpy as np
import pytest

from vllm_omni.entrypoints.openai.realtime.audio import FORMATS, OutputSound

SAMPLES = np.arange(-32768, 32768).astype(np.int16)


def ffmpeg_decoded(codec: str, data: bytes) -> np.ndarray:
    context = av.CodecContext.create(codec, "r")
    context.sample_rate, context.layout, context.format = 8000, "mono", "s16"
    (frame,) = context.decode(av.Packet(data))
    return frame.to_ndarray()[0]


@pytest.mark.parametrize(("name", "codec"), [("audio/pcmu", "pcm_mulaw"), ("audio/pcma", "pcm_alaw")])
def test_g711(name: str, codec: str) -> None:
    sound = FORMATS[name]
    every = bytes(range(256))
    values = sound.decode(every)
    np.testing.assert_array_equal(values, ffmpeg_decoded(codec, every))
    # Every sample gets a nearest code.
    errors = np.abs(sound.decode(sound.encode(SAMPLES)).astype(int) - SAMPLES)
    nearest = np.abs(values.astype(int)[None] - SAMPLES[::97, None].astype(int)).min(axis=1)
    np.testing.assert_array_equal(errors[::97], nearest)


def test_pcm() -> None:
    sound = FORMATS["audio/pcm"]
    np.testing.assert_array_equal(sound.decode(sound.encode(SAMPLES)), SAMPLES)


def tone(seconds: float, rate: int) -> np.ndarray:
    return (np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate) * 16000).astype("<i2")


@pytest.mark.parametrize(
    ("name", "rate", "speed", "tolerance"),
    [("audio/pcm", 24000, 1.0, 0), ("audio/pcmu", 24000, 1.0, 0.02), ("audio/pcm", 16000, 1.0, 0.02),
     ("audio/pcma", 24000, 1.5, 0.1), ("audio/pcm", 24000, 0.5, 0.1)],
)  # fmt: skip
def test_output(name: str, rate: int, speed: float, tolerance: float) -> None:
    output = OutputSound(name, rate, speed)
    pcm = tone(2.0, rate)
    samples = pcm.astype(np.float32) / 32768
    data = b"".join(output.encode(piece) for piece in np.split(samples, 10)) + output.finish()
    assert output.seconds(data) == pytest.approx(2.0 / speed, abs=tolerance + 1e-6)
    # The pitch stays.
    made = FORMATS[name].decode(data).astype(float)
    peak = np.argmax(np.abs(np.fft.rfft(made))) / output.seconds(data)
    assert peak == pytest.approx(440, abs=5)
    if not tolerance:
        assert data == pcm.tobytes()
        assert OutputSound(name, rate, speed).encode(np.stack([2 * samples, 0 * samples])) == data  # Of two channels.
