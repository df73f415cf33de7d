# SPDX-License-Identifier: Apache-2.0
"""The configuration of both stages: Llama's fields for the composer, and what its tokens sound like."""

from typing import ClassVar

from transformers import LlamaConfig

PITCHES = (57, 60, 62, 64, 67, 69, 72, 74, 76, 79)
"""MIDI numbers of a pentatonic scale, in which no two notes clash."""


class TuneConfig(LlamaConfig):
    """Ids 0 to 255 are bytes of text, `end_id` ends a tune, and `first_note_id + i` is `notes[i]`, a pitch and its
    length in beats."""

    model_type: ClassVar[str] = "tune"

    end_id: int = 256
    first_note_id: int = 257
    notes: tuple[tuple[int, int], ...] = tuple((pitch, beats) for pitch in PITCHES for beats in (1, 2))
    instruments: tuple[str, ...] = ("flute", "organ", "harp")
    sample_rate: int = 24_000
