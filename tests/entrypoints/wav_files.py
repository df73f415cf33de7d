# SPDX-License-Identifier: Apache-2.0
"""WAV files as clients send them."""

import base64
import io

import numpy as np
import soundfile
import torch


def float_wav(sound: tuple[torch.Tensor | np.ndarray, int]) -> bytes:
    """Samples and their rate as a file of float samples, so that nothing is rounded."""
    samples, rate = sound
    file = io.BytesIO()
    soundfile.write(file, np.asarray(samples), rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def as_uri(wav: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(wav).decode()
