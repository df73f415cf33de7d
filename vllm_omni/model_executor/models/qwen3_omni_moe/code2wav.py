# SPDX-License-Identifier: Apache-2.0
"""The vocoder: turns the frames of codes of requests into waveforms, whole or window by window.

A request's waveform is HF transformers' `Qwen3OmniMoeCode2Wav` of all its frames at once, however they are cut: the
network is causal, and each window takes up where the one before has ended. (The reference's own `chunked_decode` is not
that: it loses samples wherever it cuts, every 300 frames.) Windows of many requests run as one batch, and a window of
many frames runs as several pieces, which bounds the memory.

This file knows no talker and no engine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.platforms import current_platform

from vllm_omni.model_executor.models.qwen3_omni_moe.vocoder_carry import Carry
from vllm_omni.model_executor.models.qwen3_omni_moe.vocoder_layers import StreamingCode2Wav

PIECE_FRAMES = 320
"""Frames of one request in one batch."""

MAX_BATCH_FRAMES = 8 * PIECE_FRAMES
"""Frames of one batch, padding included: bounds the memory of the widest activation."""

ACTIVATION_COPIES = 6
"""Tensors of the size of the widest activation that are needed at the same time, an upper estimate."""

MAX_BATCH_FRAMES_CPU = 64
"""A CPU gains from a batch only until its activations leave the caches; larger batches run slower than one by one."""

MIN_FILL = 0.8
"""Pieces shorter than this part of the longest of their batch wait for another batch, to keep padding small."""


@dataclass(slots=True)
class Window:
    """The frames of one request in one step, and how far they are.

    Attributes:
        codes: int64 `[num_code_groups, frames]`, those that are not decoded yet.
        state: `[state_size]`, what the network carries over to them; None before the stream's first frame.
        num_before: Frames of the stream before them.
        is_last: No window follows.
        waves: `[samples]` each, what has been decoded.
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
    """Frames of the next piece: as many as in the others, so that none is a rest of a few."""
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


class OmniQwen3OmniMoeCode2Wav(nn.Module):
    """Decodes windows of requests; see `SupportsOneStepGeneration`."""

    is_attention_free: ClassVar[Literal[True]] = True

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"code2wav.": "code2wav.", "thinker.": None, "talker.": None})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = cast(Qwen3OmniMoeCode2WavConfig, vllm_config.model_config.hf_config)
        self.config = config
        vocoder = Qwen3OmniMoeCode2Wav._from_config(config, dtype=torch.get_default_dtype())
        self.code2wav = StreamingCode2Wav(vocoder).eval()
        self.hop = int(vocoder.total_upsample)
        self.max_batch_frames = MAX_BATCH_FRAMES_CPU if current_platform.is_cpu() else MAX_BATCH_FRAMES

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader skip files that hold only other stages' weights."""
        return not name.startswith("code2wav.")

    def activation_bytes(self, num_rows: int) -> int:
        """See `SupportsActivationEstimate`. The decoder's last block is the widest: half the channels of the block
        before it, at several times its rate."""
        channels = self.config.decoder_dim // 2 ** len(self.config.upsample_rates)
        widest = min(num_rows, MAX_BATCH_FRAMES) * self.hop * channels
        return ACTIVATION_COPIES * widest * self.code2wav.code_embedding.weight.element_size()

    def num_samples(self, num_frames: int) -> int:
        """Samples of the first `num_frames` of a stream; every later frame gives `hop`.

        Each transposed convolution of the decoder drops the `rate` samples of a stream's first position.
        """
        length = num_frames
        for factor in self.config.upsampling_ratios:
            length *= factor
        for rate in self.config.upsample_rates:
            length = (length - 1) * rate
        return length

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Required by vLLM of every model, never called: the input is not in the ids."""
        raise NotImplementedError("the vocoder reads its codes from additional_information")

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
                `[frames, num_code_groups]`, and `stream` and `is_last` as the runner adds them.

        Returns:
            One dict for each request: `audio`, float32 `[samples]` in [-1, 1] (24 kHz in the published
            checkpoint); empty for a request without frames.
        """
        windows = [self._open(information) for information in runtime_additional_information]
        while waiting := [window for window in windows if window.num_frames]:
            lengths = [piece_length(w.num_frames, min(PIECE_FRAMES, self.max_batch_frames)) for w in waiting]
            for batch in group_by_length(lengths, self.max_batch_frames):
                self._decode([waiting[i] for i in batch], [lengths[i] for i in batch])
        # Only now: if anything above raises, the step can run again.
        for window, information in zip(windows, runtime_additional_information, strict=True):
            if not window.is_last:
                information["stream"].update(state=window.state, num_frames=window.num_before)
        return [{"audio": self._join(window.waves)} for window in windows]

    def _open(self, information: dict[str, Any]) -> Window:
        stream = information["stream"]
        return Window(
            codes=information["codes"].to(self.code2wav.code_offset.device).t(),
            state=stream.get("state"),
            num_before=stream.get("num_frames", 0),
            is_last=information["is_last"],
        )

    def _decode(self, windows: list[Window], lengths: list[int]) -> None:
        """Runs one batch of the network over the next frames of these windows, so many of each."""
        codes = windows[0].codes.new_zeros(len(windows), self.config.num_quantizers, max(lengths))
        for row, window, length in zip(codes, windows, lengths, strict=True):
            row[:, :length] = window.codes[:, :length]
        goes_on = any(not w.is_last or w.num_frames > length for w, length in zip(windows, lengths, strict=True))
        carry = Carry(self._stack_states(windows), lengths, [window.num_before for window in windows], goes_on)
        waves = self.code2wav(codes, carry).float()
        states = carry.new_states() if goes_on else [None] * len(windows)
        for window, length, wave, state in zip(windows, lengths, waves, states, strict=True):
            num_samples = length * self.hop if window.num_before else self.num_samples(length)
            window.waves.append(wave[:num_samples])
            window.codes = window.codes[:, length:]
            window.num_before += length
            window.state = None if state is None else state.clone()  # Not the whole batch's memory.

    def _stack_states(self, windows: list[Window]) -> torch.Tensor:
        """`[B, state_size]`"""
        fresh = self.code2wav.new_state()
        return torch.stack([fresh if window.state is None else window.state for window in windows])

    def _join(self, waves: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(waves) if waves else torch.empty(0, device=self.code2wav.code_offset.device)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Required by vLLM of every model that generates, never called: nothing is sampled."""
        raise NotImplementedError("the vocoder samples no tokens")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self)
        return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)
