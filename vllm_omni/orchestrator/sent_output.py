# SPDX-License-Identifier: Apache-2.0
"""What a caller has received of a streamed output: when a stage's process dies, the request is computed again, and its
stream goes on where it was.

Belongs to the orchestrator's thread.
"""

import zlib
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import torch

from vllm_omni.outputs import Completion, StageOutput, stream_dim

_STRIDE = 64
"""Of 64 rows of a tensor one is kept: 1.5 kB of a second of sound."""


class RepetitionError(Exception):
    """An output that is made again does not begin as the one that was sent."""


class _Sent(ABC):
    """A part of the output that grows.

    Attributes:
        num: Units that were sent.
        num_repeated: Units that were made again.
    """

    def __init__(self) -> None:
        self.num = self.num_repeated = 0

    def restart(self) -> None:
        """It is made again."""
        self.num_repeated = 0

    def count_known(self, piece: Any) -> int:
        """How many units of a piece were sent before.

        Raises:
            RepetitionError: They differ.
        """
        begin, known = self.num_repeated, min(len(piece), self.num - self.num_repeated)
        self.num_repeated += len(piece)
        if known:
            self._compare(piece[:known], begin)
        if known < len(piece):
            self._keep(piece[known:], begin + known)
            self.num = self.num_repeated
        return known

    @abstractmethod
    def _compare(self, units: Any, begin: int) -> None:
        """Compares units with those that were sent from `begin` on. Raises as `count_known`."""

    @abstractmethod
    def _keep(self, units: Any, begin: int) -> None:
        """Notes units that are sent, from `begin` on."""


class _SentValues(_Sent):
    """A text, or tokens, of which a checksum is kept."""

    def __init__(self, to_bytes: Callable[[Any], Any]) -> None:
        super().__init__()
        self._to_bytes = to_bytes
        self._checksum = 0
        self._repeated = 0  # the checksum of what was made again

    def _compare(self, units: Any, begin: int) -> None:
        self._repeated = zlib.crc32(self._to_bytes(units), self._repeated if begin else 0)
        if self.num_repeated >= self.num and self._repeated != self._checksum:
            raise RepetitionError

    def _keep(self, units: Any, begin: int) -> None:
        self._checksum = zlib.crc32(self._to_bytes(units), self._checksum)


class _SentRows(_Sent):
    """A tensor of which some rows are kept. Those that are made again may differ by as much as kernels do with the size
    of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[torch.Tensor] = []

    def _compare(self, units: torch.Tensor, begin: int) -> None:
        if len(self._marks) > 1:
            self._marks = [torch.cat(self._marks)]
        again = units[-begin % _STRIDE :: _STRIDE].double()
        first = -(-begin // _STRIDE)
        sent = self._marks[0][first : first + len(again)].double()
        if not torch.allclose(again, sent, rtol=0.01, atol=0.001, equal_nan=True):
            raise RepetitionError

    def _keep(self, units: torch.Tensor, begin: int) -> None:
        self._marks.append(units[-begin % _STRIDE :: _STRIDE].clone())


class SentOutput:
    """The streamed output of one stage for one request."""

    def __init__(self) -> None:
        self._texts: dict[int, _Sent] = defaultdict(lambda: _SentValues(str.encode))  # by index of a sequence
        self._tokens: dict[int, _Sent] = defaultdict(lambda: _SentValues(partial(array, "q")))
        self._rows: dict[str, _Sent] = defaultdict(_SentRows)
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
        characters = self._texts[index].count_known(text)
        known = self._tokens[index].count_known(tokens)
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
        known = self._rows[name].count_known(rows)
        return tensor if known == 0 else rows[known:].movedim(0, dim)

    @property
    def _parts(self) -> Iterator[_Sent]:
        return chain(self._texts.values(), self._tokens.values(), self._rows.values())
