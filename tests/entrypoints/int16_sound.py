# SPDX-License-Identifier: Apache-2.0
"""Speech of a real vocoder as clients get it, rounded to int16."""

import numpy as np


def assert_sounds_like(speech: bytes | np.ndarray, expected: bytes | np.ndarray) -> None:
    """A step of int16 is for the last bits of sums in another order: the vocoder's windows depend on the load."""
    samples, wanted = (np.frombuffer(sound, "<i2").astype(int) for sound in (speech, expected))
    assert samples.size > 0
    np.testing.assert_allclose(samples, wanted, rtol=0, atol=1)
