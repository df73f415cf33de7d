# SPDX-License-Identifier: Apache-2.0
"""The second stage: makes sound of notes. A note rings on while the next ones are played, also into the next window."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_omni import StageInput, StageInputProcessor, StageOutput, StageRequest, WindowConfig
from vllm_omni.model_executor.layers.vocoder import Vocoder

NUM_PARTIALS = 8
ATTACK_S, RING_S = 0.01, 0.5
"""Seconds until a note is loud, and that it rings on after its end."""


class ComposerToSynthesizer(StageInputProcessor):
    """Token ids become pitches and lengths: one placeholder id for each note."""

    reads: ClassVar[tuple[str, ...]] = ("completions",)
    window: ClassVar[WindowConfig] = WindowConfig(unit="tokens")

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
        """
        Returns:
            None where the window has no note; but the last window of a tune lets its notes ring.
        """
        (window,) = sources.values()
        first = self.hf_config.first_note_id
        token_ids = window.completions[0].token_ids if window.completions else []
        notes = [self.hf_config.notes[token - first] for token in token_ids if token >= first]
        if not notes and (window.start == 0 or not window.is_last):
            return None
        return StageInput(
            prompt_token_ids=[0] * max(1, len(notes)),
            additional_information={
                "notes": torch.tensor(notes, dtype=torch.int64).view(-1, 2),
                "instrument": list(self.hf_config.instruments).index(request.options["speaker"]),
                "tempo": request.options["tempo"],
            },
            finish_reason=window.finish_reason,
        )

    def empty_output(self) -> dict[str, torch.Tensor]:
        return {"audio": torch.empty(0)}


class Instruments(nn.Module):
    """
    Attributes:
        partials: `[instruments, NUM_PARTIALS]`, amplitudes of the multiples of a note's frequency.
        decays: `[instruments]`, per second.
    """

    def __init__(self, num_instruments: int) -> None:
        super().__init__()
        self.partials = nn.Parameter(torch.zeros(num_instruments, NUM_PARTIALS), requires_grad=False)
        self.decays = nn.Parameter(torch.zeros(num_instruments), requires_grad=False)


class TuneSynthesizer(Vocoder):
    checkpoint_prefix: ClassVar[str] = "synthesizer."

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.sample_rate = config.sample_rate
        self.num_ringing = round(RING_S * config.sample_rate)
        self.synthesizer = Instruments(len(config.instruments))

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
            runtime_additional_information: One dict for each request: `notes`, int64 `[notes, 2]`, `instrument` and
                `tempo`, and `state` and `is_last` as the runner adds them.

        Returns:
            `audio`, float32 `[samples]`, for each request.
        """
        return [{"audio": self._play(**information)} for information in runtime_additional_information]

    def _play(
        self, notes: torch.Tensor, instrument: int, tempo: float, state: dict[str, torch.Tensor], is_last: bool
    ) -> torch.Tensor:
        lengths = [round(60 / tempo * beats * self.sample_rate) for beats in notes[:, 1].tolist()]
        wave = self.synthesizer.partials.new_zeros(sum(lengths) + self.num_ringing, dtype=torch.float32)
        if "ringing" in state:
            wave[: self.num_ringing] = state["ringing"]
        start = 0
        for pitch, length in zip(notes[:, 0].tolist(), lengths, strict=True):
            wave[start : start + length + self.num_ringing] += self._note(pitch, length, instrument)
            start += length
        if is_last:
            return wave
        state["ringing"] = wave[start:].clone()
        return wave[:start]

    def _note(self, pitch: int, length: int, instrument: int) -> torch.Tensor:
        """`[length + num_ringing]`: a sum of partials that rises, decays, and fades while it rings."""
        partials, decay = self.synthesizer.partials[instrument].float(), self.synthesizer.decays[instrument].float()
        num_samples = length + self.num_ringing
        samples = torch.arange(num_samples, device=partials.device)
        seconds = samples / self.sample_rate
        frequency = 440 * 2 ** ((pitch - 69) / 12)
        multiples = torch.arange(1, NUM_PARTIALS + 1, device=partials.device)[:, None]
        cycles = samples.double() * multiples * (frequency / self.sample_rate)  # In float32 they would be inexact.
        tones = torch.sin(2 * torch.pi * cycles.frac().float())  # [partials, samples]
        attack = (seconds / ATTACK_S).clamp(max=1)
        fade = ((num_samples - samples) / self.num_ringing).clamp(max=1)
        return partials @ tones * attack * fade * torch.exp(-decay * seconds)
