# SPDX-License-Identifier: Apache-2.0
"""How long the outputs of a stage that makes sound play, and what its clients have left to play."""

from vllm_omni.outputs import StageOutput


def playing_s(piece: StageOutput, sample_rate: int | None) -> float:
    """Seconds of a piece's `audio`, `[samples]`, `[channels, samples]` or one sample; 0 if it has none.

    Args:
        sample_rate: Samples per second. None: outputs are no sound.
    """
    audio = piece.tensors.get("audio")
    if audio is None or sample_rate is None:
        return 0.0
    return (audio.shape[-1] if audio.ndim else 1) / sample_rate


class Playback:
    """What the client of one stream has to play, if it plays from the first output on.

    Attributes:
        until: When it has played all (`time.monotonic()`); at first, when the stream began.
    """

    def __init__(self, now: float, sent_s: float = 0.0) -> None:
        """
        Args:
            sent_s: Seconds at the beginning of the stream that the client has.
        """
        self.until = now
        self._sent_s = sent_s

    def add(self, now: float, seconds: float) -> None:
        """An output of so many seconds was sent. A client that has run dry plays on with it."""
        known = min(self._sent_s, seconds)
        self._sent_s -= known
        if seconds > known:
            self.until = max(self.until, now) + seconds - known


class PlayingTime:
    """How long units of the input play, by those so far.

    A unit is a frame of codes, a character of a text, or whatever else windows consist of. Outputs that are no sound
    take no time to play.
    """

    def __init__(self) -> None:
        self._num_units = 0
        self._seconds = 0.0

    def add(self, num_units: int, seconds: float) -> None:
        """The output of so many units plays so many seconds."""
        self._num_units += num_units
        self._seconds += seconds

    def estimate(self, num_units: int) -> float:
        """Seconds that the output of so many units plays; 0 before the first output."""
        return num_units * self._seconds / max(self._num_units, 1)
