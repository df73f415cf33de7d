# SPDX-License-Identifier: Apache-2.0
"""Speech from flite, a small synthesizer with free voices (Debian package `flite`)."""

import random
import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import soundfile

from vllm_omni_talk.speech_recognition import resample

SAMPLE_RATE = 24_000
"""Of what the model speaks."""
INPUT_RATE = 16_000
"""Of what the model hears."""
SPEAKERS = {"Ada": "slt", "Ben": "rms"}
"""The model's voices, and the voices of flite that they imitate."""
HEARD_VOICES = ("slt", "rms", "awb", "kal")
"""The voices whose questions the model learns to hear; flite's `kal16` is for the evaluation."""
FRAME = 1920
"""Samples of one row of codes: 80 ms."""


def speak(text: str, voice: str, rate: int = SAMPLE_RATE, speed: float = 1.0, pitch: float = 1.0) -> np.ndarray:
    """float32 `[samples]` in -1 to 1, with 80 ms of silence at both ends.

    Args:
        speed, pitch: Factors on the voice's own.
    """
    options = {"duration_stretch": 1 / speed}
    if pitch != 1.0:
        options["int_f0_target_mean"] = _PITCH[voice] * pitch
    samples, begin, end = _run_flite(text, voice, rate, **options)
    edge = np.zeros(rate * FRAME // SAMPLE_RATE, np.float32)
    return np.concatenate([edge, samples[begin:end], edge])


def speak_word(text: str, voice: str) -> np.ndarray:
    """A word that lasts whole frames: float32 `[frames * 1920]` in -1 to 1."""
    stretch = 1.0
    for _ in range(2):  # The second time as long as whole frames.
        samples, begin, end = _run_flite(text, voice, SAMPLE_RATE, duration_stretch=stretch)
        num_frames = max(2, round((end - begin) / FRAME))
        stretch *= num_frames * FRAME / (end - begin)
    word = np.pad(samples[begin : begin + num_frames * FRAME], (0, max(0, begin + num_frames * FRAME - len(samples))))
    fade = np.linspace(0, 1, SAMPLE_RATE // 200, dtype=np.float32)
    word[: len(fade)] *= fade
    word[-len(fade) :] *= fade[::-1]
    return word


def _run_flite(text: str, voice: str, rate: int, **options: float) -> tuple[np.ndarray, int, int]:
    """Samples, and where the speech in them begins and ends."""
    settings = [part for name, value in options.items() for part in ("--setf", f"{name}={value}")]
    with TemporaryDirectory() as folder:
        file = Path(folder, "speech.wav")
        command = ["flite", "-voice", voice, "-psdur", *settings, "-t", text, "-o", str(file)]
        phones = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        original, own_rate = soundfile.read(file, dtype="float32")
    samples = resample(original, own_rate, rate)
    ends = [(name, float(seconds)) for name, seconds in re.findall(r"(\S+):([\d.]+)", phones)]
    begin = ends[0][1] if ends[0][0] == "pau" else 0.0
    end = ends[-2][1] if ends[-1][0] == "pau" else ends[-1][1]
    return samples, int(begin * rate), int(end * rate)


_PITCH = {"slt": 170.0, "rms": 105.0, "awb": 130.0, "kal16": 105.0, "kal": 105.0}
"""In Hz."""


def speak_all(jobs: Iterable[tuple[Any, ...]]) -> list[np.ndarray]:
    """`speak` for each tuple of arguments."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: speak(*job), jobs))


def add_noise(rng: random.Random, samples: np.ndarray, least_db: float = 15.0) -> np.ndarray:
    """Changes the volume at random, and adds white or low noise at `least_db` to 40 dB below the speech."""
    noise = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(len(samples)).astype(np.float32)
    if rng.random() < 0.5:
        noise = np.cumsum(noise) - np.convolve(np.cumsum(noise), np.ones(400) / 400, "same")
    power = np.sqrt(np.mean(samples**2)) * 10 ** (-rng.uniform(least_db, 40.0) / 20)
    noisy = samples + noise * (power / np.sqrt(np.mean(noise**2)))
    return (noisy * rng.uniform(0.3, 1.0) / np.abs(noisy).max()).astype(np.float32)
