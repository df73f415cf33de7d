# SPDX-License-Identifier: Apache-2.0
"""The vocoder: turns the frames of codes of requests into waveforms, whole or window by window.

A request's waveform is that of HF transformers' `Qwen3OmniMoeCode2Wav` for all its frames at once, for any windows: the
network is causal, and each window starts from the state of the one before. (The reference's own `chunked_decode`
loses samples at each cut, every 300 frames.) Windows of many requests run as one batch, and a window of many frames
runs as several pieces, which bounds the memory.

This file knows no talker and no engine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_omni.model_executor.models.qwen3_omni_moe.vocoder_layers import StatefulCode2Wav
from vllm_omni.model_executor.models.qwen3_omni_moe.vocoder_state import LayerStates
from vllm_omni.model_executor.models.qwen_omni.vocoder import QwenOmniVocoder

PIECE_FRAMES = 320
"""Frames of one request in one batch."""

MAX_BATCH_FRAMES = 8 * PIECE_FRAMES
"""Frames of one batch, padding included: bounds the memory of the widest activation."""

ACTIVATION_COPIES = 6
"""Tensors of the size of the widest activation that are needed at the same time, an upper estimate."""

MAX_BATCH_FRAMES_CPU = 64
"""Larger batches run slower than one by one on a CPU: their activations do not fit into its caches."""

MIN_FILL = 0.8
"""Pieces shorter than this part of the longest of their batch wait for another batch, to keep padding small."""


@dataclass(slots=True)
class Window:
    """The frames of one request in one step, and what of them is decoded.

    Attributes:
        codes: int64 `[num_code_groups, frames]`, those that are not decoded yet.
        state: `[state_size]`, the state of the network before them; None before the request's first frame.
        num_before: Frames of the request before them.
        is_last: No window follows.
        waves: `[samples]` each, the decoded ones.
    """

    codes: torch.Tensor
    state: torch.Tensor | None
    num_before: int
    is_last: bool
    waves: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_frames(self) -> int:
        return self.codes.shape[1]


def piece_length(num_frames: int, max_frames: int) -> int:
    """Frames of the next piece; all pieces have about the same length."""
    return -(-num_frames // -(-num_frames // max_frames))


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


class OmniQwen3OmniMoeCode2Wav(QwenOmniVocoder):
    checkpoint_prefix: ClassVar[str] = "code2wav."

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = cast(Qwen3OmniMoeCode2WavConfig, vllm_config.model_config.hf_config)
        self.config = config
        vocoder = Qwen3OmniMoeCode2Wav._from_config(config, dtype=torch.get_default_dtype())
        self.code2wav = StatefulCode2Wav(vocoder).eval()
        self.hop = int(vocoder.total_upsample)
        self.max_batch_frames = MAX_BATCH_FRAMES_CPU if current_platform.is_cpu() else MAX_BATCH_FRAMES

    def activation_bytes(self, num_rows: int) -> int:
        """See `SupportsActivationEstimate`. The decoder's last block is the widest: half the channels of the block
        before it, at several times its rate."""
        channels = self.config.decoder_dim // 2 ** len(self.config.upsample_rates)
        widest = min(num_rows, MAX_BATCH_FRAMES) * self.hop * channels
        return ACTIVATION_COPIES * widest * self.code2wav.code_embedding.weight.element_size()

    def num_samples(self, num_frames: int) -> int:
        """Samples of the first `num_frames` of a request; every later frame gives `hop`.

        Each transposed convolution of the decoder drops the `rate` samples of a request's first position.
        """
        length = num_frames
        for factor in self.config.upsampling_ratios:
            length *= factor
        for rate in self.config.upsample_rates:
            length = (length - 1) * rate
        return length

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
            runtime_additional_information: One dict for each request: `codes`, int64
                `[frames, num_code_groups]`, and `state` and `is_last` as the runner adds them.

        Returns:
            One dict for each request: `audio`, float32 `[samples]` in [-1, 1] (24 kHz in the published
            checkpoint); empty for a request without frames.
        """
        windows = [self._start(information) for information in runtime_additional_information]
        while waiting := [window for window in windows if window.num_frames]:
            lengths = [piece_length(w.num_frames, min(PIECE_FRAMES, self.max_batch_frames)) for w in waiting]
            for batch in group_by_length(lengths, self.max_batch_frames):
                self._decode([waiting[i] for i in batch], [lengths[i] for i in batch])
        # At the end: if anything above raises, the step can run again.
        for window, information in zip(windows, runtime_additional_information, strict=True):
            if not window.is_last:
                information["state"].update(state=window.state, num_frames=window.num_before)
        nothing = torch.empty(0, device=self.code2wav.code_offset.device)
        return [{"audio": torch.cat(window.waves) if window.waves else nothing} for window in windows]

    def _start(self, information: dict[str, Any]) -> Window:
        state = information["state"]
        return Window(
            codes=information["codes"].to(self.code2wav.code_offset.device).t(),
            state=state.get("state"),
            num_before=state.get("num_frames", 0),
            is_last=information["is_last"],
        )

    def _decode(self, windows: list[Window], lengths: list[int]) -> None:
        """Runs one batch of the network over the next frames of these windows, `lengths` of each."""
        codes = windows[0].codes.new_zeros(len(windows), self.config.num_quantizers, max(lengths))
        for row, window, length in zip(codes, windows, lengths, strict=True):
            row[:, :length] = window.codes[:, :length]
        continues = any(not w.is_last or w.num_frames > length for w, length in zip(windows, lengths, strict=True))
        states = LayerStates(self._stack_states(windows), lengths, [window.num_before for window in windows], continues)
        waves = self.code2wav(codes, states).float()
        new_states = states.new_states() if continues else [None] * len(windows)
        for window, length, wave, state in zip(windows, lengths, waves, new_states, strict=True):
            num_samples = length * self.hop if window.num_before else self.num_samples(length)
            window.waves.append(wave[:num_samples])
            window.codes = window.codes[:, length:]
            window.num_before += length
            window.state = None if state is None else state.clone()  # Without the whole batch's memory.

    def _stack_states(self, windows: list[Window]) -> torch.Tensor:
        """`[B, state_size]`"""
        initial = self.code2wav.new_state()
        return torch.stack([initial if window.state is None else window.state for window in windows])
