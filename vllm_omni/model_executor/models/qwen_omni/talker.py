# SPDX-License-Identifier: Apache-2.0
"""The base of both talkers: M-RoPE, and weights of the thinker's that their prompts need."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.multimodal.inputs import MultiModalFeatureSpec

from vllm_omni.model_executor.layers.talker import Talker

THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"


class QwenOmniTalker(Talker, SupportsMRoPE):
    hf_to_vllm_mapper: ClassVar[WeightsMapper]

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Linear positions; the stage input processor sends others with its prompts."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """vLLM's loader skips files that hold only other stages' weights."""
        return not name.startswith("talker.") and name != THINKER_EMBEDDING

    def load_with_thinker_embeds(
        self, weights: Iterable[tuple[str, torch.Tensor]], token_ids: list[int]
    ) -> tuple[set[str], torch.Tensor]:
        """The names of the parameters that were loaded, and `[len(token_ids), thinker_hidden]`, the thinker's
        embeddings of these tokens, which are in the same checkpoint.

        Raises:
            ValueError: The checkpoint has no thinker embedding.
        """
        embeds: list[torch.Tensor] = []

        def take_embeds() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == THINKER_EMBEDDING:
                    embeds.append(tensor[token_ids].clone())
                else:
                    yield name, tensor

        loaded = AutoWeightsLoader(self).load_weights(take_embeds(), mapper=self.hf_to_vllm_mapper)
        if not embeds:
            raise ValueError(f"the checkpoint has no {THINKER_EMBEDDING!r}, which the talker's prompt needs")
        return loaded, embeds[-1]
