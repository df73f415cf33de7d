# SPDX-License-Identifier: Apache-2.0
"""The base of causal vocoders: turns the frames of codes of requests into waveforms, whole or window by window.

A request's waveform is that of one pass over all its frames, for any windows: the network is causal, and each window
starts from the state of the one before. Windows of many requests run as one batch, and a window of many frames runs as
several pieces, which bounds the memory. This file knows no model and no engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vllm_omni.model_executor.layers.causal_state import LayerStates
from vllm_omni.model_executor.layers.vocoder import BatchedVocoder

MIN_FILL = 0.8
"""Pieces shorter than this part of the longest of their batch wait for another batch, to keep padding small."""


@dataclass(slots=True)
class Window:
    """The frames of one request in one step, and what of them is decoded.

    Attributes:
        codes: int64 `[codebooks, frames]`, those that are not decoded yet.
        state: `[state_size]`, the state of the network before them.
        num_before: Frames of the request before them.
        is_last: No window follows.
        waves: `[samples]` each, the decoded ones.
    """

    codes: torch.Tensor
    state: torch.Tensor
    num_before: int
    is_last: bool
    waves: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_frames(self) -> int:
        return self.codes.shape[1]


def group_by_length(lengths: list[int], max_frames: int) -> Iterator[list[int]]:
    """Batches of at most `max_frames` (or one piece) as lists of indices into `lengths`, longest first."""
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        full = (len(batch) + 1) * longest > max_frames
        if batch and (full or lengths[index] < MIN_FILL * longest):
            yield batch
            batch = []
        if not batch:
            longest = lengths[index]
        batch.append(index)
    if batch:
        yield batch


class CausalNetwork(Protocol):
    """Layers with state, as `causal_convs`."""

    def new_state(self) -> torch.Tensor:
        """`[state_size]`, that of a request before its first frame, on the network's device."""
        ...

    def __call__(self, codes: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, codebooks, L]` int64 -> `[B, samples]`, each row's own samples first."""
        ...


class CausalVocoder(BatchedVocoder):
    """
    Attributes:
        network: A module under the name of its weights' prefix, too.
    """

    @property
    def network(self) -> CausalNetwork:
        raise NotImplementedError

    def num_samples(self, num_frames: int) -> int:
        """Samples of the first `num_frames` of a request; every later frame gives `hop`."""
        return num_frames * self.hop

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
            input_ids, positions: Not read; the ids are placeholders, one for each frame.
            runtime_additional_information: One dict for each request: `codes`, int64 `[frames, codebooks]`; optionally
                `num_silent`, how many of the first window's frames are only heard by those after them; and `state` and
                `is_last` as the runner adds them.

        Returns:
            One dict for each request: `audio`, float32 `[samples]`; empty for a request without frames.
        """
        initial = self.network.new_state()
        windows = [self._start(information, initial) for information in runtime_additional_information]
        while waiting := [window for window in windows if window.num_frames]:
            lengths = [self.next_piece(window.num_frames) for window in waiting]
            for batch in group_by_length(lengths, self.max_batch_frames):
                self._decode([waiting[i] for i in batch], [lengths[i] for i in batch])
        # At the end: if anything above raises, the step can run again.
        for window, information in zip(windows, runtime_additional_information, strict=True):
            if not window.is_last:
                information["state"].update(state=window.state, num_frames=window.num_before)
        nothing = torch.empty(0, device=initial.device)
        waves = [torch.cat([*window.waves, nothing]) for window in windows]
        silent = [information.get("num_silent", 0) for information in runtime_additional_information]
        return [{"audio": wave[self.num_samples(n) if n else 0 :]} for wave, n in zip(waves, silent, strict=True)]

    @staticmethod
    def _start(information: dict[str, Any], initial: torch.Tensor) -> Window:
        state = information["state"]
        return Window(
            codes=information["codes"].to(initial.device).t(),
            state=state.get("state", initial),
            num_before=state.get("num_frames", 0),
            is_last=information["is_last"],
        )

    def _decode(self, windows: list[Window], lengths: list[int]) -> None:
        """Runs one batch of the network over the next frames of these windows, `lengths` of each."""
        codes = windows[0].codes.new_zeros(len(windows), windows[0].codes.shape[0], max(lengths))
        for row, window, length in zip(codes, windows, lengths, strict=True):
            row[:, :length] = window.codes[:, :length]
        continues = any(not w.is_last or w.num_frames > length for w, length in zip(windows, lengths, strict=True))
        stacked = torch.stack([window.state for window in windows])  # [B, state_size]
        states = LayerStates(stacked, lengths, [window.num_before for window in windows], continues)
        waves = self.network(codes, states).float()
        new_states = states.new_states() if continues else [None] * len(windows)
        for window, length, wave, state in zip(windows, lengths, waves, new_states, strict=True):
            num_samples = length * self.hop if window.num_before else self.num_samples(length)
            window.waves.append(wave[:num_samples])
            window.codes = window.codes[:, length:]
            window.num_before += length
            if state is not None:
                window.state = state.clone()  # Without the whole batch's memory.
