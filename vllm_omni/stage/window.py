# SPDX-License-Identifier: Apache-2.0
"""Cuts the output of a source into the windows that a stage reads."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import torch

from vllm_omni.config.stage_config import SENTENCES, WindowConfig
from vllm_omni.outputs import Completion, StageOutput, merge_stage_outputs, stream_dim
from vllm_omni.stage.sentences import SentenceCutter

Unit = TypeVar("Unit")


class WindowSizes:
    """The sizes of the windows of one stream: the first one, growing ones, and then always `window_size`.

    A window grows from what the one before it gives to play, which is less than that window by the right context, once:
    later windows give what they hold back, too.
    """

    def __init__(self, config: WindowConfig) -> None:
        self._config = config
        self.current = 1 if config.first_is_clause else config.first_window_size
        self._num_units = self.current  # of the windows so far

    def advance(self) -> None:
        config = self._config
        if config.window_growth is None:
            self.current = config.window_size
        else:
            played = min(self.current, self._num_units - config.right_context)
            grown = math.ceil(config.window_growth * (played if played > 0 else self.current))
            self.current = min(grown, config.window_size)
        self._num_units += self.current


class WindowState:
    """One request's stream on one edge.

    With `window_size` -1 there is one window, the whole output, when it is complete. With n there is a window for every
    n units, the first ones smaller (see `WindowSizes`), each with up to `left_context` units before it, and one for the
    rest at the end. Only the unit is cut; all other fields are part of the next window.
    """

    def __init__(self, config: WindowConfig) -> None:
        self._config = config
        self._pieces: list[StageOutput] = []
        self._units = _make_units(config)
        self._sizes = WindowSizes(config)
        self._next = 0
        self.has_ended = False

    def add(self, piece: StageOutput) -> list[StageOutput]:
        """Adds the next piece; returns the windows that it completes."""
        self.has_ended = piece.is_last
        if not self._config.streams:
            self._pieces.append(piece)
            return [merge_stage_outputs(self._take_pieces())] if piece.is_last else []
        self._pieces.append(self._units.take_from(piece))
        windows = []
        while self._num_waiting() >= self._sizes.current + piece.is_last:  # keeps units for the last window
            windows.append(self._cut(self._sizes.current, is_last=False))
            self._sizes.advance()
        if piece.is_last:
            windows.append(self._cut(self._num_waiting(), is_last=True))
        return windows

    def _num_waiting(self) -> int:
        return self._units.end - self._next

    def _cut(self, size: int, is_last: bool) -> StageOutput:
        context = min(self._config.left_context, self._next) if size else 0
        window = msgspec.structs.replace(
            merge_stage_outputs(self._take_pieces()), start=self._next, context=context, is_last=is_last
        )
        self._units.put_into(window, self._next - context, self._next + size)
        self._next += size
        self._units.forget_before(self._next - self._config.left_context)
        return window

    def _take_pieces(self) -> list[StageOutput]:
        """The pieces for the next window. An empty piece with the same ids replaces them."""
        pieces = self._pieces
        last = pieces[-1]
        self._pieces = [StageOutput(request_id=last.request_id, stage_id=last.stage_id)]
        return pieces


def make_cutter(config: WindowConfig) -> SentenceCutter:
    return SentenceCutter(first_is_clause=config.first_is_clause)


def _make_units(config: WindowConfig) -> "_TokenUnits | _RowUnits | _SentenceUnits":
    if config.unit == "tokens":
        return _TokenUnits()
    return _SentenceUnits(make_cutter(config)) if config.unit == SENTENCES else _RowUnits(config.unit)


class _CompletionUnits(ABC, Generic[Unit]):
    """Units that are cut from a field of the first completion."""

    def __init__(self) -> None:
        self._start = 0
        self._units: list[Unit] = []

    @abstractmethod
    def _cut(self, first: Completion, is_last: bool) -> Sequence[Unit]:
        """The units that a piece's first completion completes."""

    @abstractmethod
    def _as_field(self, units: Sequence[Unit]) -> dict[str, Any]:
        """The field, by its name, with these units."""

    @property
    def end(self) -> int:
        return self._start + len(self._units)

    def take_from(self, piece: StageOutput) -> StageOutput:
        first = piece.first_completion
        self._units += self._cut(first or Completion(), piece.is_last)
        return piece if first is None else self._with_units(piece, ())

    def put_into(self, window: StageOutput, start: int, stop: int) -> None:
        units = self._units[start - self._start : stop - self._start]
        window.completions = self._with_units(window, units).completions

    def forget_before(self, position: int) -> None:
        if position > self._start:
            del self._units[: position - self._start]
            self._start = position

    def _with_units(self, output: StageOutput, units: Sequence[Unit]) -> StageOutput:
        first = msgspec.structs.replace(output.first_completion or Completion(), **self._as_field(units))
        others = [completion for completion in output.completions if completion.index]
        return msgspec.structs.replace(output, completions=[first, *others])


class _TokenUnits(_CompletionUnits[int]):
    def _cut(self, first: Completion, is_last: bool) -> Sequence[int]:
        return first.token_ids

    def _as_field(self, units: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(units)}


class _SentenceUnits(_CompletionUnits[str]):
    def __init__(self, cutter: SentenceCutter) -> None:
        super().__init__()
        self._cutter = cutter

    def _cut(self, first: Completion, is_last: bool) -> Sequence[str]:
        return self._cutter.add(first.text, is_last=is_last)

    def _as_field(self, units: Sequence[str]) -> dict[str, Any]:
        return {"text": "".join(units)}


class _RowUnits:
    """The rows of one tensor; of audio, its samples."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._dim = stream_dim(name)
        self._start = 0
        self._rows: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self._start + (0 if self._rows is None else self._rows.shape[self._dim])

    def take_from(self, piece: StageOutput) -> StageOutput:
        rows = piece.tensors.get(self._name)
        if rows is None:
            return piece
        self._rows = rows if self._rows is None else torch.cat((self._rows, rows), self._dim)
        others = {name: tensor for name, tensor in piece.tensors.items() if name != self._name}
        return msgspec.structs.replace(piece, tensors=others)

    def put_into(self, window: StageOutput, start: int, stop: int) -> None:
        if self._rows is not None:
            rows = self._rows.narrow(self._dim, start - self._start, stop - start)
            window.tensors = {**window.tensors, self._name: rows}

    def forget_before(self, position: int) -> None:
        if self._rows is not None and position > self._start:
            self._rows = self._rows.narrow(self._dim, position - self._start, self.end - position).clone()
            self._start = position
