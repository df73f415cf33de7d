# SPDX-License-Identifier: Apache-2.0
"""How one request's codes are vocoded window by window.

Neither half of the vocoder is causal. Of a window that is not the last one, the last blocks of frames are therefore
held back: they are computed as context of the blocks before them, and computed again with the next window. The state
of the windows before enters a window as the keys and values of their last block, and as the frames of the spectrogram
that the wave's first samples depend on. The first samples of a window are cross-faded with the earlier window's result
for them.

The remaining difference to the wave of all codes at once, measured on the tiny checkpoint with windows of 36 codes (and
with those of the stage configuration): 6e-4 (3e-4) of the wave's RMS, at most 2e-2 of it, near the borders of windows.
With two blocks held back it is a hundredth of that, but every window computes 12 more codes twice, and the first audio
comes later. The number of samples equals that of the whole.

This file knows no weights.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_omni.model_executor.models.qwen2_5_omni.token2wav_dit import DiTInput

HELD_BLOCKS = 1
"""Whole blocks of frames at a window's end that are held back; 12 codes, 0.24 s each in the published checkpoint."""

CONTEXT_FRAMES = 24
"""Frames of the spectrogram before and after a window that its wave is made from."""

FADE_FRAMES = 1
"""Frames, 10 ms each, of the cross-fade of two windows."""


@dataclass(frozen=True, slots=True)
class VocoderState:
    """A request's state between two windows.

    Codes and noise are on the CPU, everything computed from them is on the vocoder's device.

    Attributes:
        codes: `[T]` int64, those that are held back.
        noise: float32 `[repeats * T, mel_dim]`, theirs.
        generator_state: Of the generator that draws the noise of later codes.
        num_blocks: Blocks that are final.
        past: The keys and values of the last of them; None before the first.
        mel: float32 `[frames, mel_dim]`, up to `CONTEXT_FRAMES` final ones.
        overlap: float32 `[samples]`, the last window's result for the samples after its end.
    """

    codes: torch.Tensor
    noise: torch.Tensor
    generator_state: torch.Tensor
    num_blocks: int
    past: torch.Tensor | None
    mel: torch.Tensor
    overlap: torch.Tensor


@dataclass(frozen=True, slots=True)
class CodeWindow:
    """What is computed for one request in one step: the codes held back before, and the new ones.

    Attributes:
        state: The state after the window before it, with the new codes and their noise.
        speaker: Name in lower case.
        num_final_blocks: Blocks that this window makes final.
        num_final_frames: Their frames, which become audio.
    """

    state: VocoderState
    speaker: str
    num_final_blocks: int
    num_final_frames: int
    is_last: bool

    @property
    def dit_input(self) -> DiTInput:
        state = self.state
        kept = None if self.is_last else self.num_final_blocks - 1
        return DiTInput(state.codes, state.noise, self.speaker, state.num_blocks, state.past, kept)

    def choose_frames(self, mel: torch.Tensor) -> torch.Tensor:
        """`[frames, mel_dim]` of the window -> those that its wave is computed from."""
        return torch.cat([self.state.mel, mel[: self.num_final_frames + CONTEXT_FRAMES]])


@dataclass(frozen=True, slots=True)
class WindowPlanner:
    """Makes windows of a request's input, and the state after a window of what was computed for it.

    Attributes:
        device: The vocoder's.
    """

    repeats: int
    mel_dim: int
    block_size: int
    samples_per_frame: int
    device: torch.device

    def start(self, information: dict[str, Any], state: VocoderState | None) -> CodeWindow:
        """
        Args:
            information: `codes`, int64 `[T]`, may be empty; `speaker`; `is_last`; `seed` or none.
            state: None for a request's first window.
        """
        if state is None:
            state = self._first_state(information.get("seed"))
        state = self._extend(state, information["codes"])
        num_frames, is_last = state.noise.shape[0], bool(information["is_last"])
        if is_last:
            return CodeWindow(state, information["speaker"], -(-num_frames // self.block_size), num_frames, is_last)
        blocks = max(0, num_frames // self.block_size - HELD_BLOCKS)
        return CodeWindow(state, information["speaker"], blocks, blocks * self.block_size, is_last)

    def finish(
        self, window: CodeWindow, mel: torch.Tensor, past: torch.Tensor | None, wave: torch.Tensor
    ) -> tuple[torch.Tensor, VocoderState]:
        """The window's audio, and the state after it.

        Args:
            mel: `[frames, mel_dim]`, of all frames of the window.
            past: Keys and values of the last final block.
            wave: `[samples]` computed from `window.choose_frames(mel)`.
        """
        state, frames = window.state, window.num_final_frames
        wave = wave[state.mel.shape[0] * self.samples_per_frame :]
        audio, rest = wave[: frames * self.samples_per_frame], wave[frames * self.samples_per_frame :]
        after = VocoderState(
            codes=state.codes[frames // self.repeats :],
            noise=state.noise[frames:].clone(),
            generator_state=state.generator_state,
            num_blocks=state.num_blocks + window.num_final_blocks,
            past=past,
            mel=torch.cat([state.mel, mel[:frames]])[-CONTEXT_FRAMES:].clone(),
            overlap=rest[: FADE_FRAMES * self.samples_per_frame].clone(),
        )
        return _fade(state.overlap, audio), after

    def _first_state(self, seed: int | None) -> VocoderState:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return VocoderState(
            codes=torch.empty(0, dtype=torch.int64),
            noise=torch.empty(0, self.mel_dim),
            generator_state=generator.get_state(),
            num_blocks=0,
            past=None,
            mel=torch.empty(0, self.mel_dim, device=self.device),
            overlap=torch.empty(0, device=self.device),
        )

    def _extend(self, state: VocoderState, codes: torch.Tensor) -> VocoderState:
        """Draws noise in the order of the frames: windows get the same noise as the whole."""
        generator = torch.Generator()
        generator.set_state(state.generator_state)
        noise = torch.randn(self.repeats * codes.shape[0], self.mel_dim, generator=generator)
        return replace(
            state,
            codes=torch.cat([state.codes, codes]),
            noise=torch.cat([state.noise, noise]),
            generator_state=generator.get_state(),
        )


def _fade(overlap: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
    """`audio`, whose beginning is cross-faded from `overlap`."""
    length = min(overlap.shape[0], audio.shape[0])
    if length == 0:
        return audio
    weight = torch.linspace(0, 1, length + 2, device=audio.device)[1:-1]
    return torch.cat([torch.lerp(overlap[:length], audio[:length], weight), audio[length:]])
