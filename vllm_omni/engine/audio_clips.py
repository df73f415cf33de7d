# SPDX-License-Identifier: Apache-2.0
"""Long sounds in clips that a model that transcribes reads at once."""

from collections.abc import Sequence

import numpy as np
from vllm.multimodal.audio import split_audio

CUT_SHARE = 1 / 3
"""Of a clip, at its end: where the pause is looked for at which a long sound is cut. vLLM looks in one second, which
may have none."""
PAUSE_S = 0.2
"""Of the pause; vLLM's is half of that, and is found within words."""


def split_sound(sound: np.ndarray, sample_rate: float, longest_s: float) -> Sequence[np.ndarray]:
    """A sound, float32 `[samples]`, in clips of at most `longest_s` seconds; cut where it is quietest."""
    if len(sound) <= longest_s * sample_rate:
        return [sound]
    return split_audio(sound, int(sample_rate), longest_s, CUT_SHARE * longest_s, int(PAUSE_S * sample_rate))
