# SPDX-License-Identifier: Apache-2.0
"""Spoken questions: recordings of flite's voice kal16, which training never heard."""

from pathlib import Path

import numpy as np
import soundfile

from coloured_shapes.speech import SAMPLE_RATE
from vllm_omni_talk.speech_recognition import resample

RECORDINGS = {file.stem.replace("_", " "): file for file in Path(__file__).with_name("questions").glob("*.flac")}


def recording(question: str) -> np.ndarray:
    """int16 `[samples]` at 24 kHz."""
    samples, rate = soundfile.read(RECORDINGS[question], dtype="float32")
    return (resample(samples, rate, SAMPLE_RATE) * 32767).astype("<i2")
