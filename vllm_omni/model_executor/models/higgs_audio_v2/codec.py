# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio's codec: encodes the sounds of prompts, and turns delayed frames into sound."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import HiggsAudioV2TokenizerConfig
from vllm.config import VllmConfig

from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.layers.delay_pattern import DelayPattern
from vllm_omni.model_executor.layers.frames_to_codec import FramesToCodec
from vllm_omni.model_executor.layers.lookahead_vocoder import LookaheadVocoder
from vllm_omni.model_executor.layers.vocoder import load_own
from vllm_omni.model_executor.models.higgs_audio_v2.tokenizer import HiggsAudioTokenizer
from vllm_omni.outputs import StageOutput

_ENDS_REACH, _UNIT_REACH = 3, 3 + 9 + 27
"""Positions on either side that DAC's first and last convolution read, and the three of a block."""

_ENCODER = ("acoustic_encoder", "encoder_semantic", "semantic_model", "fc")
_DECODER = ("acoustic_decoder", "fc1", "fc2")


class HiggsAudioEncoder(nn.Module):
    """Encodes whole sounds, one at a time."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__()
        self.model = _make_model(config, without=(*_DECODER, "decoder_semantic"))

    def load(self, weights: dict[str, torch.Tensor]) -> set[str]:
        """Loads the codec's weights; those of its decoder are not read. Returns the names of the loaded parameters."""
        return {f"model.{name}" for name in load_own(self.model, weights)}

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        """float32 `[samples]` -> `[num_sound_frames(samples), num_codes]` int64."""
        return self.model.encode(sound[None, None]).audio_codes[0].T


class OmniHiggsAudioCodec(LookaheadVocoder):
    """Decodes in float32. What is no code in a frame, such as an end id, counts as the last code, as in the
    reference."""

    checkpoint_prefix: ClassVar[str] = ""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        self.model = _make_model(config, without=(*_ENCODER, "decoder_semantic", "fc1"))
        self.pattern = _pattern(config)
        self.hop = config.hop_length
        self.num_context = _context_frames(config.acoustic_model_config.upsampling_ratios)

    def align(self, rows: torch.Tensor) -> torch.Tensor:
        return self.pattern.undelay(rows)

    def decode(self, frames: torch.Tensor) -> torch.Tensor:
        codes = frames.clamp(0, self.config.codebook_size - 1)
        return self.model.decode(codes.transpose(1, 2)).audio_values[:, 0]

    def activation_bytes(self, num_rows: int) -> int:
        """See `SupportsActivationEstimate`. Each block has half the channels of the one before, at a higher rate."""
        acoustic = self.config.acoustic_model_config
        last = acoustic.decoder_hidden_size // 2 ** len(acoustic.upsampling_ratios)
        return self.widest_bytes(num_rows, last)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {f"model.{name}" for name in load_own(self.model, dict(weights))}


class RowsToCodec(FramesToCodec):
    """Passes delayed rows to the codec, without those of start ids and of end ids. The last window leaves in any case:
    the codec still has frames that wait for what follows."""

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
        made = super().process(request, sources)
        (source,) = sources.values()
        if made is not None or not source.is_last:
            return made
        return StageInput(
            prompt_token_ids=[0],
            additional_information={"codes": torch.zeros(0, self.hf_config.num_quantizers, dtype=torch.int64)},
            finish_reason=source.finish_reason,
        )

    def select(self, codes: torch.Tensor) -> torch.Tensor:
        pattern = _pattern(self.hf_config)
        return codes[(codes != pattern.start_id).any(1) & (codes != pattern.end_id).any(1)]


def _pattern(config: Any) -> DelayPattern:
    """Start and end are the ids behind the codes."""
    return DelayPattern(config.num_quantizers, config.codebook_size, config.codebook_size + 1)


def _context_frames(strides: Iterable[int]) -> int:
    """Frames on either side of a frame that its samples depend on. The kernel of a block's transposed convolution is
    twice its stride."""
    reach = _ENDS_REACH
    for stride in reversed(list(strides)):
        reach, padding = reach + _UNIT_REACH, math.ceil(stride / 2)
        reach = max((reach + padding - 1) // stride + 1, 1 + math.ceil((reach - padding) / stride))
    return reach + _ENDS_REACH


def _make_model(config: Any, without: tuple[str, ...]) -> Any:
    """Makes the model in float32, whatever the other stages' dtype, without some of its parts."""
    model = HiggsAudioTokenizer._from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for part in without:
        delattr(model, part)
    return model
