# SPDX-License-Identifier: Apache-2.0
"""What a caller has received of a streamed output: when a stage's process dies, the request is computed again, and its
stream goes on where it was.

Belongs to the orchestrator's thread.
"""

import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import torch

from vllm_omni.outputs import Completion, StageOutput, stream_dim

_STRIDE = 64
"""Of 64 rows of a tensor one is kept: 1.5 kB of a second of sound."""


class RepetitionError(Exception):
    """An output that is made again does not begin as the one that was sent."""


@dataclass(slots=True)
class _Sent:
    """A text, or tokens, of which a checksum is kept.

    Attributes:
        num, checksum: Of what was sent.
        num_repeated, repeated: Of what was made again.
    """

    num: int = 0
    checksum: int = 0
    num_repeated: int = 0
    repeated: int = 0

    def restart(self) -> None:
        self.num_repeated = self.repeated = 0

    def count_known(self, num: int, to_bytes: Callable[[int, int], Any]) -> int:
        """How many units of a piece were sent before.

        Args:
            num: Units of the piece.
            to_bytes: The bytes of units from one to another.

        Raises:
            RepetitionError: They differ.
        """
        known = min(num, self.num - self.num_repeated)
        self.num_repeated += num
        if known:
            self.repeated = zlib.crc32(to_bytes(0, known), self.repeated)
            if self.num_repeated >= self.num and self.repeated != self.checksum:
                raise RepetitionError
        if known < num:
            self.num = self.num_repeated
            self.checksum = self.repeated = zlib.crc32(to_bytes(known, num), self.checksum)
        return known


class _SentRows:
    """A tensor that grows, of which some rows are kept. Those that are made again may differ by as much as kernels do
    with the size of a batch."""

    def __init__(self) -> None:
        self.num = self.num_repeated = 0
        self._marks: list[torch.Tensor] = []

    def restart(self) -> None:
        self.num_repeated = 0
        self._marks = [torch.cat(self._marks)] if self._marks else []

    def count_known(self, rows: torch.Tensor) -> int:
        """How many rows of a piece were sent before.

        Raises:
            RepetitionError: They differ.
        """
        known = min(len(rows), self.num - self.num_repeated)
        if known:
            again = rows[-self.num_repeated % _STRIDE : known : _STRIDE].double()
            begin = -(-self.num_repeated // _STRIDE)
            sent = self._marks[0][begin : begin + len(again)].double()
            if not torch.allclose(again, sent, rtol=0.01, atol=0.001, equal_nan=True):
                raise RepetitionError
        if known < len(rows):
            self._marks.append(rows[known + -(self.num_repeated + known) % _STRIDE :: _STRIDE].clone())
        self.num_repeated += len(rows)
        self.num = max(self.num, self.num_repeated)
        return known


class SentOutput:
    """The streamed output of one stage for one request."""

    def __init__(self) -> None:
        self._texts: dict[int, _Sent] = {}  # by index of a sequence
        self._tokens: dict[int, _Sent] = {}
        self._rows: dict[str, _SentRows] = {}
        self._num_media = 0
        self._ended: set[int] = set()  # indices of sequences
        self._steps: dict[int, int] = {}  # the last one, by index of a diffusion stage's output
        self._has_begun = self._has_ended = self._is_repeating = False

    def restart(self) -> None:
        """The output is made again."""
        self._is_repeating = self._has_begun
        for part in self._parts:
            part.restart()

    def take_new(self, piece: StageOutput) -> StageOutput | None:
        """What is new in the next piece of the output; None: nothing.

        Raises:
            RepetitionError: What was sent before differs from what the piece has there.
        """
        if piece.step is not None:
            return self._take_step(piece, piece.step)
        completions = [new for each in piece.completions if (new := self._take_completion(each)) is not None]
        tensors = self._take_tensors(piece)
        is_end = piece.is_last and not self._has_ended
        self._has_begun, self._has_ended = True, self._has_ended or piece.is_last
        if not self._is_repeating:
            return piece
        self._is_repeating = any(part.num_repeated < part.num for part in self._parts)
        if self._is_repeating and piece.is_last:
            raise RepetitionError
        if not (completions or tensors or is_end):
            return None
        return msgspec.structs.replace(
            piece, completions=completions, tensors=tensors, prompt_logprobs=None, num_cached_tokens=None
        )

    def _take_step(self, piece: StageOutput, step: int) -> StageOutput | None:
        index = piece.data.get("index", 0)
        if step <= self._steps.get(index, -1):
            return None
        self._steps[index], self._has_begun = step, True
        return piece

    def _take_completion(self, completion: Completion) -> Completion | None:
        index, text, tokens = completion.index, completion.text, completion.token_ids
        characters = self._texts.setdefault(index, _Sent()).count_known(
            len(text), lambda begin, end: text[begin:end].encode()
        )
        known = self._tokens.setdefault(index, _Sent()).count_known(
            len(tokens), lambda begin, end: array("q", tokens[begin:end])
        )
        has_ended = completion.finish_reason is not None and index not in self._ended
        if has_ended:
            self._ended.add(index)
        if not self._is_repeating:
            return completion
        if not has_ended and characters == len(text) and known == len(tokens):
            return None
        logprobs = completion.logprobs and completion.logprobs[known:]
        return msgspec.structs.replace(completion, text=text[characters:], token_ids=tokens[known:], logprobs=logprobs)

    def _take_tensors(self, piece: StageOutput) -> dict[str, torch.Tensor]:
        if piece.num_media:  # They come whole.
            is_known, self._num_media = self._num_media > 0, piece.num_media
            return {} if is_known else piece.tensors
        tensors = {name: self._take_rows(name, tensor) for name, tensor in piece.tensors.items()}
        return {name: tensor for name, tensor in tensors.items() if tensor.numel()}

    def _take_rows(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = stream_dim(name)
        rows = (tensor[None] if tensor.ndim == 0 else tensor).movedim(dim, 0)
        known = self._rows.setdefault(name, _SentRows()).count_known(rows)
        return tensor if known == 0 else rows[known:].movedim(0, dim)

    @property
    def _parts(self) -> Iterator[_Sent | _SentRows]:
        return chain(self._texts.values(), self._tokens.values(), self._rows.values())
