# SPDX-License-Identifier: Apache-2.0
"""What a stage that makes sound has measured of its windows: how long they play, and how long they take."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from vllm_omni.outputs import StageOutput

_NUM_RECENT = 16
_MIN_S = 1e-6
_MARGIN = 2.0
"""The next window is expected to take so many times as long as recent ones."""


def playing_s(piece: StageOutput, sample_rate: int | None) -> float:
    """Seconds of a piece's `audio`, `[samples]` or `[channels, samples]`; 0 if it has none.

    Args:
        sample_rate: Samples per second. None: outputs are no sound.
    """
    audio = piece.tensors.get("audio")
    return 0.0 if audio is None or sample_rate is None else audio.shape[-1] / sample_rate


class Playback:
    """What the client of one stream has to play, if it plays from the first output on.

    Attributes:
        until: When it has played all (`time.monotonic()`); at first, when the stream began.
        is_behind: The stream is made again, and what the client has was not reached yet.
    """

    def __init__(self, now: float, sent_s: float = 0.0) -> None:
        """
        Args:
            sent_s: Seconds at the beginning of the stream that the client has.
        """
        self.until = now
        self._sent_s = sent_s

    @property
    def is_behind(self) -> bool:
        return self._sent_s > 0

    def add(self, now: float, seconds: float) -> None:
        """An output of so many seconds was sent. A client that has run dry plays on with it."""
        known = min(self._sent_s, seconds)
        self._sent_s -= known
        if seconds > known:
            self.until = max(self.until, now) + seconds - known


class Pace:
    """How long units of the input play, and how long they take to arrive and to be computed, by those so far.

    A unit is a frame of codes, a character of a text, or whatever else windows consist of. Outputs that are no sound
    take no time to play.
    """

    def __init__(self) -> None:
        self._num_units = 0
        self._seconds = 0.0
        # Seconds for each unit.
        self._arrivals: deque[float] = deque(maxlen=_NUM_RECENT)
        self._windows: deque[float] = deque(maxlen=_NUM_RECENT)

    def add_arrival(self, seconds: float, num_units: int) -> None:
        """So many units of a request have arrived, so long after those before them."""
        self._arrivals.append(seconds / num_units)

    def add_output(self, seconds: float, num_units: int, playing: float) -> None:
        """
        Args:
            seconds: That the window took, with its time in the engine's queue.
            playing: Seconds that its output plays.
        """
        self._num_units += num_units
        self._seconds += playing
        self._windows.append(max(seconds, _MIN_S) / max(num_units, 1))

    @property
    def plays(self) -> bool:
        """Whether it is known how long units play."""
        return self._seconds > 0

    def playing_s(self, num_units: int) -> float:
        """Seconds that the output of so many units plays; 0 before the first output."""
        return num_units * self._seconds / max(self._num_units, 1)

    def making_s(self, num_units: int) -> float:
        """Seconds that a window of so many units takes, with a margin, if it is as slow as others were."""
        return _MARGIN * num_units * _upper_quartile(self._windows)

    @property
    def next_output_s(self) -> float:
        """Seconds until one more unit has arrived and been computed, with a margin."""
        # An arrival may have waited for the user who types the text.
        return _MARGIN * median(self._arrivals or [0.0]) + self.making_s(1)

    def num_units(self, seconds: float) -> int:
        """The units of a window for a client that has so much to play: as many as can be computed meanwhile, with a
        margin, but enough to play until the next ones are there."""
        enough = math.ceil(self.next_output_s / self.playing_s(1))
        return max(enough, int(seconds / (_MARGIN * min(self._windows))))


def _upper_quartile(values: Sequence[float]) -> float:
    """What three quarters of these values do not exceed: not the exceptions, as the first of a shape; 0 of none."""
    return sorted(values)[3 * len(values) // 4] if values else 0.0
