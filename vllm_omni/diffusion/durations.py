# SPDX-License-Identifier: Apache-2.0
"""Seconds of a video as a number of frames that its pipeline makes.

A VAE that compresses time makes numbers of frames of one kind only: some multiple, and one more. Which, it says in its
configuration; no weights are read.
"""

import inspect
from typing import Any

# What VAEs call it: frames that become one latent frame.
_TEMPORAL_FACTORS = ("scale_factor_temporal", "temporal_compression_ratio")


def temporal_factor(model: str, index: dict[str, Any], revision: str | None = None) -> int:
    """Frames of a video that the VAE of a checkpoint makes one of; 1 where it does not say.

    Args:
        index: The checkpoint's `model_index.json`.
    """
    import diffusers

    library, name = index.get("vae") or (None, None)
    if library != "diffusers" or not hasattr(diffusers, str(name)):
        return 1
    vae_class = getattr(diffusers, str(name))
    config = vae_class.load_config(model, subfolder="vae", revision=revision)
    known = inspect.signature(vae_class.__init__).parameters
    for factor in _TEMPORAL_FACTORS:
        value = config.get(factor, known[factor].default if factor in known else None)
        if isinstance(value, int) and value > 0:
            return value
    return 1


def nearest_num_frames(seconds: float, fps: float, factor: int) -> int:
    """The number of frames of a video of about this length, at least 1."""
    return max(0, round((seconds * fps - 1) / factor)) * factor + 1
