# SPDX-License-Identifier: Apache-2.0
"""Speech from flite, a small synthesizer with free voices (Debian package `flite`)."""

import io
import random
import subprocess
import wave
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

SAMPLE_RATE = 24_000
"""Of what the model speaks."""
INPUT_RATE = 16_000
"""Of what the model hears."""
SPEAKERS = {"Ada": "slt", "Ben": "rms"}
"""The model's voices, and the voices of flite that they imitate."""
HEARD_VOICES = ("slt", "rms", "awb", "kal")
"""The voices whose questions the model learns to hear; flite's `kal16` is for the evaluation."""


def speak(text: str, voice: str, rate: int = SAMPLE_RATE, speed: float = 1.0, pitch: float = 1.0) -> np.ndarray:
    """float32 `[samples]` in -1 to 1, with 80 ms of silence at both ends.

    Args:
        speed, pitch: Factors on the voice's own.
    """
    command = ["flite", "-voice", voice, "--setf", f"duration_stretch={1 / speed}", "-t", text, "-o", "/dev/stdout"]
    if pitch != 1.0:
        command[3:3] = ["--setf", f"int_f0_target_mean={_MEAN_PITCH[voice] * pitch}"]
    with wave.open(io.BytesIO(subprocess.run(command, check=True, capture_output=True).stdout)) as file:
        frames = file.readframes(10**9)
        original = np.frombuffer(frames, np.int16).astype(np.float32) / 32768
        samples = resample(_trim(original), file.getframerate(), rate)
    edge = np.zeros(rate * 80 // 1000, np.float32)
    return np.concatenate([edge, samples, edge])


_MEAN_PITCH = {"slt": 170.0, "rms": 105.0, "awb": 130.0, "kal16": 105.0, "kal": 105.0}


def speak_all(jobs: Iterable[tuple], **options: float) -> list[np.ndarray]:
    """`speak` for each tuple of arguments."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: speak(*job, **options), jobs))


def _trim(samples: np.ndarray, threshold: float = 0.01) -> np.ndarray:
    loud = np.flatnonzero(np.abs(samples) > threshold)
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples


def resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """By zeros, or a cut, in the spectrum."""
    if rate == new_rate:
        return samples
    length = len(samples) * new_rate // rate
    spectrum = np.fft.rfft(samples)
    kept = np.zeros(length // 2 + 1, complex)
    kept[: len(spectrum)] = spectrum[: len(kept)]
    return (np.fft.irfft(kept, length) * (length / len(samples))).astype(np.float32)


def add_noise(rng: random.Random, samples: np.ndarray, least_db: float = 15.0) -> np.ndarray:
    """With random volume, and white or low noise at `least_db` to 40 dB below the speech."""
    noise = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(len(samples)).astype(np.float32)
    if rng.random() < 0.5:
        noise = np.cumsum(noise) - np.convolve(np.cumsum(noise), np.ones(400) / 400, "same")
    power = np.sqrt(np.mean(samples**2)) * 10 ** (-rng.uniform(least_db, 40.0) / 20)
    noisy = samples + noise * (power / np.sqrt(np.mean(noise**2)))
    return (noisy * rng.uniform(0.3, 1.0) / np.abs(noisy).max()).astype(np.float32)
