# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio's codec: encodes the sounds of prompts, and turns delayed frames into sound."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import HiggsAudioV2TokenizerConfig
from transformers.models.dac.modeling_dac import Snake1d
from vllm.config import VllmConfig

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.layers.delay_pattern import DelayPattern
from vllm_omni.model_executor.layers.frames_to_codec import FramesToCodec
from vllm_omni.model_executor.layers.lookahead_vocoder import LookaheadVocoder
from vllm_omni.model_executor.layers.vocoder import load_own
from vllm_omni.model_executor.models.higgs_audio_v2.tokenizer import HiggsAudioTokenizer
from vllm_omni.outputs import StageOutput

_ENDS_REACH, _UNITS_REACH = 3, 3 + 9 + 27
"""Positions on either side that DAC's first and last convolution read, and the three residual units of a block."""

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


class Snake(nn.Module):
    """DAC's activation, `x + sin(alpha * x)**2 / alpha`: the same results in fewer passes and one buffer."""

    def __init__(self, snake: Snake1d) -> None:
        super().__init__()
        self.alpha = snake.alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, channels, L]` -> the same shape."""
        waves = (self.alpha * x).sin_().square_()
        return waves.mul_((self.alpha + 1e-9).reciprocal()).add_(x)


class OmniHiggsAudioCodec(LookaheadVocoder):
    """Decodes in float32. What is no code in a frame, such as an end id, counts as the last code, as in the
    reference."""

    checkpoint_prefix: ClassVar[str] = ""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        self.model = _make_model(config, without=(*_ENCODER, "decoder_semantic", "fc1"))
        for module in list(self.model.acoustic_decoder.modules()):
            for name, part in module.named_children():
                if isinstance(part, Snake1d):
                    setattr(module, name, Snake(part))
        self.pattern = _pattern(config)
        self.hop = config.hop_length
        self.strides = list(config.acoustic_model_config.upsampling_ratios)
        first, end = _positions(self.strides, 0, 1)[0]
        self.num_context = max(-first, end - 1) + _ENDS_REACH

    def align(self, rows: torch.Tensor) -> torch.Tensor:
        return self.pattern.undelay(rows)

    def decode(self, frames: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Each layer computes only the positions that the samples depend on: the frames around them are decoded at the
        lowest rates, and hardly anything of them at the highest."""
        codes = frames.clamp(0, self.config.codebook_size - 1)
        embeds = self.model.fc2(self.model.quantizer.decode(codes.permute(2, 0, 1)).transpose(1, 2))
        decoder, offset = self.model.acoustic_decoder, 0
        x = decoder.conv1(embeds.transpose(1, 2))  # [B, channels, positions from `offset` on]
        *inputs, last = _positions(self.strides, start, stop)
        for block, stride, (first, end) in zip(decoder.block, self.strides, inputs, strict=True):
            x, offset = _cut(x, offset, first, end)
            x, offset = block(x), offset * stride
        x, offset = _cut(x, offset, *last)
        wave = decoder.conv2(decoder.snake1(x))[:, 0]
        return wave[:, start * self.hop - offset : stop * self.hop - offset]

    def activation_bytes(self, num_rows: int) -> int:
        """See `SupportsActivationEstimate`. Each block has half the channels of the one before, at a higher rate."""
        acoustic = self.config.acoustic_model_config
        last = acoustic.decoder_hidden_size // 2 ** len(acoustic.upsampling_ratios)
        return self.widest_bytes(num_rows + 2 * self.num_context, last)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {f"model.{name}" for name in load_own(self.model, dict(weights))}


class RowsToCodec(FramesToCodec):
    """Passes delayed rows to the codec, without those of start ids and of end ids. The last window leaves in any case:
    the codec still has frames that wait for what follows.

    The context is that of the published codec: rows that a frame is spread over, and frames that its sound depends on.
    """

    window: ClassVar[WindowConfig] = WindowConfig(unit="codes", right_context=7 + 10)

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


def _positions(strides: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """Positions `first..end` of the input of each block, and of that of the last convolution, that the samples of the
    frames `start..stop` depend on; some are outside of the sound. The kernel of a block's transposed convolution is
    twice its stride."""
    hop = math.prod(strides)
    first, end = start * hop - _ENDS_REACH, stop * hop + _ENDS_REACH
    positions = [(first, end)]
    for stride in reversed(strides):
        padding = math.ceil(stride / 2)
        first = (first - _UNITS_REACH + padding - stride) // stride
        end = (end + _UNITS_REACH - 1 + padding) // stride + 1
        positions.insert(0, (first, end))
    return positions


def _cut(x: torch.Tensor, offset: int, first: int, end: int) -> tuple[torch.Tensor, int]:
    """The positions `first..end` of `[B, channels, L]`, which begins at `offset`, and where these begin."""
    first = max(first, offset)
    return x[..., first - offset : end - offset], first


def _make_model(config: Any, without: tuple[str, ...]) -> Any:
    """Makes the model in float32, whatever the other stages' dtype, without some of its parts."""
    model = HiggsAudioTokenizer._from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for part in without:
        delattr(model, part)
    return model
