# SPDX-License-Identifier: Apache-2.0
"""Judges from the sound of a pause whether a user has finished: smart-turn v3, a Whisper encoder with one output.

Its network is a file in the wheel of pipecat-ai (BSD-2-Clause), the extra `turn-model`. Nothing of that package is
imported. The input is that of its `LocalSmartTurnAnalyzerV3`: the last 8 seconds, with zeros before a shorter sound.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np

SAMPLE_RATE = 16000
MAX_SECONDS = 8
_THRESHOLD = 0.5  # As in pipecat.
_FOLDER = Path("audio", "turn", "smart_turn", "data")


class TurnModel:
    """Shared by all sessions: it has no state."""

    def __init__(self, path: Path) -> None:
        """`path`: Of the ONNX file: `input_features [n, 80, 800]` -> probabilities `[n, 1]`."""
        import onnxruntime
        from transformers import WhisperFeatureExtractor

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._network = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._features = WhisperFeatureExtractor(chunk_length=MAX_SECONDS)

    def is_complete(self, samples: np.ndarray) -> bool:
        """Whether the turn has ended. Takes about 50 ms of one core.

        Args:
            samples: float32 `[n]` at 16 kHz, of the turn with the silence after it; its last 8 seconds are read.
        """
        size = MAX_SECONDS * SAMPLE_RATE
        samples = np.pad(samples[-size:], (max(0, size - len(samples)), 0))
        features = self._features(samples, sampling_rate=SAMPLE_RATE, return_tensors="np", do_normalize=True)
        (probabilities,) = self._network.run(None, {"input_features": features["input_features"].astype(np.float32)})
        return float(probabilities[0, 0]) > _THRESHOLD


def find() -> Path | None:
    """The file of the newest network that is installed; None: there is none, or nothing that runs it."""
    spec = importlib.util.find_spec("pipecat")
    if spec is None or importlib.util.find_spec("onnxruntime") is None:
        return None
    folders = spec.submodule_search_locations or ()
    files = [file for folder in folders for file in (Path(folder) / _FOLDER).glob("smart-turn-v3*cpu.onnx")]
    return max(files, default=None)


@functools.cache
def load() -> TurnModel | None:
    """The model of this installation, if it has one."""
    path = find()
    return None if path is None else TurnModel(path)
