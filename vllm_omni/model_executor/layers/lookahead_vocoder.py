# SPDX-License-Identifier: Apache-2.0
"""The base of vocoders that look ahead: the sound of a frame depends on a few frames before it, and a few after it.

A request's waveform is that of one pass over all its frames, for any windows: a frame is decoded when those that it
depends on have arrived, with these around it, and only its own samples leave. The samples of the frames around it would
be wrong, because layers pad where frames are cut off. This file knows no model and no engine.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from vllm_omni.model_executor.layers.vocoder import BatchedVocoder


@dataclass(slots=True)
class Piece:
    """Frames that are decoded at once.

    Attributes:
        frames: int64 `[frames, codebooks]`, with those around them.
        start, stop: Those whose samples leave.
        waves: Where these go, `[samples]` each, in order.
        index: In `waves`.
    """

    frames: torch.Tensor
    start: int
    stop: int
    waves: list[torch.Tensor] = field(repr=False)
    index: int


class LookaheadVocoder(BatchedVocoder):
    """
    Attributes:
        num_context: Frames before a frame, and after it, that its samples depend on.
    """

    num_context: int

    @abstractmethod
    def decode(self, frames: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Decodes the frames `start..stop` among those around them. Of these it computes as little as it can: batches
        are sized without them.

        Args:
            frames: `[B, L, codebooks]` int64, on the model's device.

        Returns:
            float32 `[B, (stop - start) * hop]`.
        """

    def align(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, codebooks]` of a request -> its frames that are complete in these rows, one for each row but the last
        ones."""
        return rows

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        runtime_additional_information: list[dict[str, Any]],
        **kwargs: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """
        Args:
            input_ids, positions: Not read; the ids are placeholders, one for each row.
            runtime_additional_information: One dict for each request: `codes`, int64 `[rows, codebooks]`, and `state`
                and `is_last` as the runner adds them.

        Returns:
            One dict for each request: `audio`, float32 `[samples]`; empty where frames that come later are missing.
        """
        waves: list[list[torch.Tensor]] = [[] for _ in runtime_additional_information]
        pieces: list[Piece] = []
        states: list[dict[str, Any]] = []
        for information, own in zip(runtime_additional_information, waves, strict=True):
            rows, num_done = self._known(information)
            frames = self.align(rows)
            ready = len(frames) if information["is_last"] else max(len(frames) - self.num_context, num_done)
            pieces += self._cut(frames, num_done, ready, own)
            kept = max(ready - self.num_context, 0)
            states.append({"rows": rows[kept:].clone(), "num_done": ready - kept})
        for batch in self._batches(pieces):
            self._decode(batch)
        # At the end: if anything above raises, the step can run again.
        for information, state in zip(runtime_additional_information, states, strict=True):
            if not information["is_last"]:
                information["state"].update(state)
        nothing = torch.empty(0, device=self.device)
        return [{"audio": torch.cat([*own, nothing])} for own in waves]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _known(self, information: dict[str, Any]) -> tuple[torch.Tensor, int]:
        """All rows of a request that are still needed, and how many of their frames have left."""
        new, state = information["codes"].to(self.device), information["state"]
        return (torch.cat((state["rows"], new)), state["num_done"]) if "rows" in state else (new, 0)

    def _cut(self, frames: torch.Tensor, start: int, stop: int, waves: list[torch.Tensor]) -> Iterable[Piece]:
        """The frames `start..stop` in pieces, which bounds their memory."""
        while start < stop:
            end = start + self.next_piece(stop - start)
            first = max(start - self.num_context, 0)
            waves.append(torch.empty(0))
            yield Piece(frames[first : end + self.num_context], start - first, end - first, waves, len(waves) - 1)
            start = end

    def _batches(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Pieces of one shape: padding would be decoded into the frames before it."""
        for (_, start, stop), equal in groupby(sorted(pieces, key=_shape), key=_shape):
            alike = list(equal)
            size = max(self.max_batch_frames // (stop - start + 1), 1)
            yield from (alike[i : i + size] for i in range(0, len(alike), size))

    def _decode(self, pieces: list[Piece]) -> None:
        _, start, stop = _shape(pieces[0])
        waves = self.decode(torch.stack([piece.frames for piece in pieces]), start, stop)
        for piece, wave in zip(pieces, waves, strict=True):
            piece.waves[piece.index] = wave


def _shape(piece: Piece) -> tuple[int, int, int]:
    """Pieces with the same can be one batch."""
    return len(piece.frames), piece.start, piece.stop
