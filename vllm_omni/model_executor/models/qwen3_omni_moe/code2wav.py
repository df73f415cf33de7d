# SPDX-License-Identifier: Apache-2.0
"""The vocoder: turns the frames of codes of whole requests into waveforms, in one step.

The network is HF transformers' own `Qwen3OmniMoeCode2Wav`, with a few of its layers replaced by quicker equals; what
is ours is that many requests run as one batch. A request's output equals the reference's `chunked_decode` of it alone:
the network is causal, so frames of padding on the right change no sample that is kept.

This file knows no talker and no engine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.platforms import current_platform

from vllm_omni.model_executor.models.qwen3_omni_moe.vocoder_layers import replace_layers

CHUNK_FRAMES = 300
CONTEXT_FRAMES = 25
"""The reference decodes 300 frames at a time, after the 25 before them, and drops the samples of those 25."""

MAX_BATCH_FRAMES = 8 * (CHUNK_FRAMES + CONTEXT_FRAMES)
"""Frames of one batch, padding included: bounds the memory of the widest activation."""

MAX_BATCH_FRAMES_CPU = 64
"""A CPU gains from a batch only until its activations leave the caches; larger batches run slower than one by one."""

MIN_FILL = 0.8
"""Chunks shorter than this part of the longest of their batch wait for another batch, to keep padding small."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of frames to decode for one request.

    Attributes:
        request: Index of the request in its step.
        codes: `[num_code_groups, frames]`, context included.
        context: Frames at the front whose samples are dropped.
    """

    request: int
    codes: torch.Tensor
    context: int

    @property
    def num_frames(self) -> int:
        return self.codes.shape[1]


def split_into_chunks(request: int, codes: torch.Tensor) -> Iterator[Chunk]:
    """`[num_code_groups, frames]` -> the chunks that the reference would decode, in order."""
    for start in range(0, codes.shape[1], CHUNK_FRAMES):
        context = min(start, CONTEXT_FRAMES)
        yield Chunk(request, codes[:, start - context : start + CHUNK_FRAMES], context)


def group_by_length(chunks: list[Chunk], max_frames: int) -> Iterator[list[int]]:
    """Batches of at most `max_frames` (or one chunk) as lists of indices into `chunks`, longest first."""
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(chunks)), key=lambda i: -chunks[i].num_frames):
        full = (len(batch) + 1) * longest > max_frames
        if batch and (full or chunks[index].num_frames < MIN_FILL * longest):
            yield batch
            batch = []
        if not batch:
            longest = chunks[index].num_frames
        batch.append(index)
    if batch:
        yield batch


class OmniQwen3OmniMoeCode2Wav(nn.Module):
    """Decodes whole requests; see `SupportsOneStepGeneration`."""

    is_attention_free: ClassVar[Literal[True]] = True

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"code2wav.": "code2wav.", "thinker.": None, "talker.": None})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = cast(Qwen3OmniMoeCode2WavConfig, vllm_config.model_config.hf_config)
        self.config = config
        self.code2wav = Qwen3OmniMoeCode2Wav._from_config(config, dtype=torch.get_default_dtype()).eval()
        replace_layers(self.code2wav)
        self.max_batch_frames = MAX_BATCH_FRAMES_CPU if current_platform.is_cpu() else MAX_BATCH_FRAMES

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader skip files that hold only other stages' weights."""
        return not name.startswith("code2wav.")

    def num_samples(self, num_frames: int) -> int:
        """Samples that one decode of `num_frames` gives.

        Each transposed convolution of the decoder looks one position ahead, and so gives `rate` samples
        less than `rate` for each position.
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
                `[frames, num_code_groups]`.

        Returns:
            One dict for each request: `audio`, float32 `[samples]` in [-1, 1] (24 kHz in the published
            checkpoint); empty for a request without frames.
        """
        device = self.code2wav.code_offset.device
        codes = [information["codes"].to(device).t() for information in runtime_additional_information]
        chunks = [chunk for request, c in enumerate(codes) for chunk in split_into_chunks(request, c)]
        waves: list[torch.Tensor] = [torch.empty(0)] * len(chunks)
        for batch in group_by_length(chunks, self.max_batch_frames):
            for index, wave in zip(batch, self._decode([chunks[i] for i in batch]), strict=True):
                waves[index] = wave
        return [{"audio": self._join(chunks, waves, request)} for request in range(len(codes))]

    def _decode(self, chunks: list[Chunk]) -> list[torch.Tensor]:
        """One batch of the network; returns each chunk's own samples, without those of its context."""
        frames = max(chunk.num_frames for chunk in chunks)
        batch = chunks[0].codes.new_zeros(len(chunks), self.config.num_quantizers, frames)
        for row, chunk in zip(batch, chunks, strict=True):
            row[:, : chunk.num_frames] = chunk.codes
        waves = self.code2wav(batch)[:, 0].float()  # [B, samples]
        hop = int(self.code2wav.total_upsample)
        return [
            wave[chunk.context * hop : self.num_samples(chunk.num_frames)]
            for wave, chunk in zip(waves, chunks, strict=True)
        ]

    def _join(self, chunks: list[Chunk], waves: list[torch.Tensor], request: int) -> torch.Tensor:
        mine = [wave for chunk, wave in zip(chunks, waves, strict=True) if chunk.request == request]
        return torch.cat(mine) if mine else torch.empty(0, device=self.code2wav.code_offset.device)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Required by vLLM of every model that generates, never called: nothing is sampled."""
        raise NotImplementedError("the vocoder samples no tokens")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self)
        return loader.load_weights(weights, mapper=self.hf_to_vllm_mapper)
