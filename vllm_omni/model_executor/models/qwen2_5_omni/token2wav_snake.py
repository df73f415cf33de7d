# SPDX-License-Identifier: Apache-2.0
"""BigVGAN's activation on a CPU in one pass, in the first-level cache: upsampling, the snake, and downsampling.

Equals HF transformers' `Qwen2_5OmniAntiAliasedActivation1d` of twice the rate and twelve taps, which takes some fifteen
passes and most of the vocoder's time. Compiled by numba, which vLLM's CPU build requires. This file knows no layers and
no tensors of torch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

REACH = 3
"""Samples at the input's rate that each filter reads on each side."""
TILE = 512
"""Samples of a tile: its buffers fit into a first-level cache."""

_ORDER = 8


def _fit_squared_sine() -> np.ndarray:
    """Coefficients of z, z^2, ... of sin(pi * r)^2 for |r| <= 1/2, z = r * r; the error is below 1e-8."""
    r = 0.5 * np.cos(np.pi * (np.arange(200) + 0.5) / 400)
    z = (r * r)[:, None]
    weights = np.sin(np.pi * r) ** 2
    coefficients, *_ = np.linalg.lstsq(z ** np.arange(1, _ORDER + 1), weights, rcond=None)
    return coefficients.astype(np.float32)


_C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8 = (np.float32(c) for c in _fit_squared_sine())
_HALF = np.float32(0.5)


def phase_filters(up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Two filters of twelve taps as four of six, for the even and the odd samples of the double rate.

    Args:
        up, down: `[12]` float32; `up` includes the factor of the rate.

    Returns:
        `[2, 6]`: every second tap of `up`, from the last, and of `down`, from the second. The filters are symmetric:
        the other taps are these in reverse.
    """
    return np.ascontiguousarray(np.stack([up[11::-2], down[1::2]]), dtype=np.float32)


def _compile(signature: str) -> Callable[[Callable[..., None]], Any]:
    """Compiles a function now, or reads it from numba's cache."""

    def compile_function(function: Callable[..., None]) -> Any:
        try:
            return njit(signature, fastmath=True, nogil=True, cache=True)(function)
        except RuntimeError:  # The cache folder is not writable.
            return njit(signature, fastmath=True, nogil=True)(function)

    return compile_function


@_compile("void(float32[::1], float32[::1], float32, float32, float32[:, ::1], float32[:, ::1])")
def _activate_row(row: Any, out: Any, frequency: Any, gain: Any, filters: Any, scratch: Any) -> None:
    """One channel of one segment. `scratch`: `[3, TILE + 4 * REACH]`."""
    length = row.shape[0]
    near, even, odd = scratch[0], scratch[1], scratch[2]
    u0, u1, u2, u3, u4, u5 = filters[0, 0], filters[0, 1], filters[0, 2], filters[0, 3], filters[0, 4], filters[0, 5]
    d0, d1, d2, d3, d4, d5 = filters[1, 0], filters[1, 1], filters[1, 2], filters[1, 3], filters[1, 4], filters[1, 5]
    for start in range(0, length, TILE):
        size = min(TILE, length - start)
        for i in range(size + 4 * REACH):  # Beyond its ends a signal has its last value.
            near[i] = row[min(max(start + i - 2 * REACH, 0), length - 1)]
        for i in range(size + 2 * REACH):
            x0, x1, x2, x3 = near[i], near[i + 1], near[i + 2], near[i + 3]
            x4, x5, x6 = near[i + 4], near[i + 5], near[i + 6]
            a = u0 * x0 + u1 * x1 + u2 * x2 + u3 * x3 + u4 * x4 + u5 * x5
            b = u5 * x1 + u4 * x2 + u3 * x3 + u2 * x4 + u1 * x5 + u0 * x6
            ra, rb = a * frequency, b * frequency
            ra -= np.floor(ra + _HALF)
            rb -= np.floor(rb + _HALF)
            za, zb = ra * ra, rb * rb
            sa = ((((((_C8 * za + _C7) * za + _C6) * za + _C5) * za + _C4) * za + _C3) * za + _C2) * za + _C1
            sb = ((((((_C8 * zb + _C7) * zb + _C6) * zb + _C5) * zb + _C4) * zb + _C3) * zb + _C2) * zb + _C1
            even[i] = a + gain * sa * za
            odd[i] = b + gain * sb * zb
        if start == 0:
            for i in range(REACH):
                even[i] = odd[i] = even[REACH]
        for i in range(length - start + REACH, size + 2 * REACH):
            even[i] = odd[i] = odd[length - start + REACH - 1]
        tile = out[start : start + size]
        for i in range(tile.shape[0]):
            low = d0 * even[i + 1] + d1 * even[i + 2] + d2 * even[i + 3] + d3 * even[i + 4] + d4 * even[i + 5]
            high = d5 * odd[i] + d4 * odd[i + 1] + d3 * odd[i + 2] + d2 * odd[i + 3] + d1 * odd[i + 4] + d0 * odd[i + 5]
            tile[i] = low + d5 * even[i + 6] + high


@_compile("void(float32[:, ::1], float32[:, ::1], int64[::1], int64[::1], float32[::1], float32[::1], float32[:, ::1])")
def activate(x: Any, out: Any, starts: Any, stops: Any, frequencies: Any, gains: Any, filters: Any) -> None:
    """The activation of each segment separately, in each channel; zeros between the segments.

    Args:
        x: `[channels, samples]`.
        out: `[channels, padding + samples + padding]`, all of it written.
        starts, stops: `[segments]`, ascending.
        frequencies, gains: `[channels]`, of `x + gain * sin(pi * frequency * x)^2`.
        filters: Of `phase_filters`.
    """
    scratch = np.empty((3, TILE + 4 * REACH), np.float32)
    padding = (out.shape[1] - x.shape[1]) // 2
    for channel in range(x.shape[0]):
        end = 0
        for segment in range(starts.shape[0]):
            start, stop = starts[segment], stops[segment]
            row, filtered = x[channel, start:stop], out[channel, padding + start : padding + stop]
            _activate_row(row, filtered, frequencies[channel], gains[channel], filters, scratch)
            out[channel, end : padding + start] = 0
            end = padding + stop
        out[channel, end:] = 0
