# SPDX-License-Identifier: Apache-2.0
"""Janus-Pro's VQ decoder: decodes the tokens of an image, in one step.

Reference: `JanusVQVAE.decode` of HF transformers, whose modules it consists of. This file knows no engine.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.janus.modeling_janus import JanusVQVAEDecoder, JanusVQVAEVectorQuantizer
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader

from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.layers.vocoder import Vocoder
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput

_READS_IMAGES = ("encoder.", "quant_conv.")


class OmniJanusVQDecoder(Vocoder):
    """`image_tokens` int64 `[tokens]` -> `image` float32 `[1, height, width, 3]` in [0, 1]; requests together."""

    checkpoint_prefix: ClassVar[str] = "model.vqmodel."

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.quantize = JanusVQVAEVectorQuantizer(config)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.latent_channels, 1)
        self.decoder = JanusVQVAEDecoder(config)
        self._scale = 2 ** (len(config.channel_multiplier) - 1)
        self._channels = config.base_channels
        self.eval().requires_grad_(False)

    def activation_bytes(self, num_rows: int) -> int:
        """Three layers of the image's size at once."""
        element = next(self.parameters()).element_size()
        return 3 * num_rows * self._scale**2 * 2 * self._channels * element

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        runtime_additional_information: list[dict[str, Any]],
        **kwargs: Any,
    ) -> list[dict[str, torch.Tensor]]:
        tokens = torch.stack([each["image_tokens"] for each in runtime_additional_information]).to(input_ids.device)
        quantizer: Any = self.quantize  # It declares a type of tokens that is no tensor's.
        hidden_states = self.post_quant_conv(quantizer.get_codebook_entry(tokens))
        pixels = self.decoder(hidden_states).permute(0, 2, 3, 1)  # in [-1, 1]
        images = (pixels.float() / 2 + 0.5).clamp(0, 1)
        return [{"image": image} for image in images.split(1)]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        prefix = self.checkpoint_prefix
        own = ((name.removeprefix(prefix), tensor) for name, tensor in weights if name.startswith(prefix))
        decoding = ((name, tensor) for name, tensor in own if not name.startswith(_READS_IMAGES))
        return AutoWeightsLoader(self).load_weights(decoding)


class ImageTokensToVQDecoder(StageInputProcessor):
    reads: ClassVar[tuple[str, ...]] = ("completions",)

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput:
        (made,) = sources.values()
        assert made.first_completion is not None
        token_ids, needed = made.first_completion.token_ids, self.hf_config.vision_config.num_image_tokens
        if len(token_ids) < needed:
            raise ValueError(f"the first stage made {len(token_ids)} of {needed} image tokens; raise its max_tokens")
        return StageInput(
            prompt_token_ids=[0] * needed, additional_information={"image_tokens": torch.tensor(token_ids)}
        )
