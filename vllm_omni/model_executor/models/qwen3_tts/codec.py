# SPDX-License-Identifier: Apache-2.0
"""The codec stage: turns the talker's frames into sound, whole or window by window.

A request's waveform is that of the reference's decoder for all its frames at once, for any windows. (The reference
itself decodes 300 frames at a time, of which each but the first hears 25 frames before it: longer speech differs.)
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavTransformerModel,
)
from vllm.config import VllmConfig

from vllm_omni.model_executor.layers.causal_convs import CausalConv
from vllm_omni.model_executor.layers.causal_state import LayerStates
from vllm_omni.model_executor.layers.code2wav import Code2Wav, StatefulCode2Wav
from vllm_omni.model_executor.models.qwen3_tts.configuration import Qwen3TTSTokenizerDecoderConfig

MIN_USAGE = 1e-5
"""Of an entry of a codebook."""

Weights = Iterable[tuple[str, torch.Tensor]]


class Decoder(StatefulCode2Wav):
    """Qwen3-Omni's, with a convolution in front, and a transformer of another width than that of the convolutions.

    A code's embedding is its entry in the codebook, projected to `codebook_dim`: those of a frame are added up.
    """

    def __init__(self, config: Qwen3TTSTokenizerDecoderConfig) -> None:
        dtype = torch.get_default_dtype()
        fields = config.to_dict() | {"hidden_size": config.latent_dim, "num_hidden_layers": 0}
        layers: Any = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeCode2WavConfig(**fields), dtype=dtype)
        layers.code_embedding = nn.Embedding(config.num_quantizers * config.codebook_size, config.codebook_dim)
        transformer = layers.pre_transformer = Qwen3OmniMoeCode2WavTransformerModel._from_config(config, dtype=dtype)
        transformer.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        transformer.output_proj = nn.Linear(config.hidden_size, config.latent_dim)
        super().__init__(layers, drops_first=False)
        self.pre_conv = CausalConv(nn.Conv1d(config.codebook_dim, config.latent_dim, 3))

    def transform(self, embeddings: torch.Tensor, states: LayerStates) -> torch.Tensor:
        x = self.pre_conv.extend(embeddings.sum(1).transpose(1, 2), states).transpose(1, 2)
        transformer: Any = self.pre_transformer
        return transformer.output_proj(self.attend(transformer.input_proj(x), states))


class OmniQwen3TTSCodec(Code2Wav):
    """The codec in the checkpoint's folder `speech_tokenizer`; its configuration is that one's `decoder_config`."""

    checkpoint_prefix: ClassVar[str] = "decoder."

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = cast(Qwen3TTSTokenizerDecoderConfig, vllm_config.model_config.hf_config)
        self.decoder = Decoder(self.config).eval()
        self.hop = self.decoder.hop

    @property
    def network(self) -> Decoder:
        return self.decoder

    def load_weights(self, weights: Weights) -> set[str]:
        return super().load_weights(self._project(weights))

    def _project(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """The codebooks and their projections as one table of embeddings."""
        prefix, quantizer = "decoder.quantizer.", dict[str, torch.Tensor]()
        for name, tensor in weights:
            if name.startswith(prefix):
                quantizer[name.removeprefix(prefix)] = tensor.float()
            else:
                yield name, tensor
        parts = [("rvq_first", 0), *(("rvq_rest", index) for index in range(self.config.num_quantizers - 1))]
        yield "decoder.code_embedding.weight", torch.cat([_embeddings(quantizer, *part) for part in parts])


def _embeddings(quantizer: dict[str, torch.Tensor], part: str, index: int) -> torch.Tensor:
    """`[codebook_size, codebook_dim]`"""
    codebook = f"{part}.vq.layers.{index}._codebook"
    usage = quantizer[f"{codebook}.cluster_usage"].clamp_min(MIN_USAGE)
    entries = quantizer[f"{codebook}.embedding_sum"] / usage[:, None]
    return entries @ quantizer[f"{part}.output_proj.weight"][..., 0].T
