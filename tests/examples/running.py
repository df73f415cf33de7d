# SPDX-License-Identifier: Apache-2.0
"""How tests run an example, and read the files that it wrote."""

import runpy
import wave
from pathlib import Path

import av
import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: object) -> None:
    """As `python examples/NAME ARGUMENTS`, in this process."""
    runpy.run_path(str(EXAMPLES / name))["main"]([str(argument) for argument in arguments])


def read_wav(path: Path) -> np.ndarray:
    """int16 `[samples]` of a file that is as long as its header says, as the vocoder makes it: mono, 24 kHz."""
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        assert len(samples) == file.getnframes() > 0
    return samples


def decode_sound(path: Path) -> tuple[np.ndarray, int]:
    """float64 `[samples]` in [-1, 1], and their rate."""
    with av.open(path) as container:
        frames = [frame.to_ndarray()[0] for frame in container.decode(audio=0)]
        rate = container.streams.audio[0].rate
    samples = np.concatenate(frames)
    return (samples / 32768 if samples.dtype == np.int16 else samples.astype(np.float64)), rate


def decode_video(path: Path) -> np.ndarray:
    """uint8 `[frames, height, width, 3]`."""
    with av.open(path) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
