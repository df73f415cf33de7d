# SPDX-License-Identifier: Apache-2.0
"""What VibeVoice's frames are made with: noise, and the state of causal convolutions, for each slot. Knows no model."""

from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from vllm_omni.model_executor.feedback_buffers import with_room_for


class FrameNoise:
    """The noise of each slot's request, on the CPU, whatever the device.

    Shapes and order of the draws are the reference's, so that a seed has the same effect as `torch.manual_seed` there.
    """

    def __init__(self, latent_size: int) -> None:
        self._latent_size = latent_size
        self._generators: dict[int, torch.Generator] = {}
        self._drawn: dict[int, tuple[int, torch.Tensor]] = {}  # the last frame and its noise

    def begin(self, slot: int, params: SamplingParams) -> None:
        self.end(slot)
        seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
        self._generators[slot] = torch.Generator().manual_seed(seed)

    def end(self, slot: int) -> None:
        self._generators.pop(slot, None)
        self._drawn.pop(slot, None)

    def blur(self, slot: int, voices: list[torch.Tensor], std: float) -> list[torch.Tensor]:
        """Adds noise to the latents of a prompt's voices, `[frames, latent]` each."""
        generator = self._generators[slot]
        num_frames = max(map(len, voices))
        scales = std * torch.randn(len(voices), generator=generator)
        # The encoder's outputs are in this order in memory, in which noise is drawn.
        noise = torch.empty(len(voices), self._latent_size, num_frames).transpose(1, 2).normal_(generator=generator)
        blurs = (scales[:, None, None] * noise).to(voices[0])
        return [voice + blur[: len(voice)] for voice, blur in zip(voices, blurs, strict=True)]

    def draw(self, slots: list[int], frames: list[int]) -> torch.Tensor:
        """`[N, latent]` float32, of the next frames; drawn once for each, though a step may raise."""
        for slot, frame in zip(slots, frames, strict=True):
            if self._drawn.get(slot, (-1,))[0] != frame:
                # The reference draws for both sequences, and uses the first.
                noise = torch.randn(2, self._latent_size, generator=self._generators[slot])[0]
                self._drawn[slot] = frame, noise
        return torch.stack([self._drawn[slot][1] for slot in slots])


class SlotPaddings:
    """The last inputs of each of transformers' causal convolutions, for each slot."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._inputs: dict[str, torch.Tensor] = {}  # by layer, [slots, channels, inputs]
        self._slots = torch.empty(0)
        self._new: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(inputs.nbytes for inputs in self._inputs.values())

    def begin(self, slot: int) -> None:
        """Sound begins after silence."""
        for name, inputs in self._inputs.items():
            self._inputs[name] = with_room_for(inputs, slot)
            self._inputs[name][slot] = 0

    def at(self, slots: torch.Tensor) -> "SlotPaddings":
        """Makes it the `padding_cache` of transformers' layers for a batch of `[N]` slots."""
        self._slots, self._new = slots, {}
        return self

    def update(self, hidden_states: torch.Tensor, cache_key: str, conv_module: Any) -> torch.Tensor:
        """`[N, channels, n]`, a layer's next inputs, with those before them. Called by transformers' layers."""
        if cache_key not in self._inputs:
            shape = self._num_slots, hidden_states.shape[1], conv_module.left_pad
            self._inputs[cache_key] = hidden_states.new_zeros(shape)
        padded = torch.cat((self._inputs[cache_key][self._slots], hidden_states), -1)
        self._new[cache_key] = padded[..., padded.shape[-1] - conv_module.left_pad :]
        return padded

    def keep(self) -> None:
        """Keeps what the batch has read."""
        for name, inputs in self._new.items():
            self._inputs[name][self._slots] = inputs
        self._new = {}
