# SPDX-License-Identifier: Apache-2.0
"""Janus-Pro's autoregressive model: makes the tokens of an image of a text.

Llama's layers read the text's tokens through the text's embedding, and the image's through one of their own; both have
small numbers, so a token's place in the sequence says which it is. Only image tokens are sampled, with guidance: see
`JanusPromptProcessor`.

Reference: `JanusForConditionalGeneration` of HF transformers. This file knows no engine.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.janus.modeling_janus import JanusVQVAEAlignerMLP, JanusVQVAEHead
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_omni.model_executor.interfaces import RequestSpan


class OmniJanus(nn.Module):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "model.",
            "model.generation_": "generation_",
            "model.vqmodel.": None,
            "model.vision_model.": None,
            "model.aligner.": None,
            "lm_head.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        vq_config = config.vq_config
        self.vocab_size = config.text_config.vocab_size
        self.model = LlamaModel(
            vllm_config=vllm_config.with_hf_config(config.text_config, architectures=["LlamaForCausalLM"]),
            prefix=maybe_prefix(prefix, "model"),
        )
        self.generation_embeddings = nn.Embedding(vq_config.num_embeddings, vq_config.embed_dim)
        self.generation_aligner = JanusVQVAEAlignerMLP(vq_config)
        self.generation_head = JanusVQVAEHead(vq_config)
        self.requires_grad_(False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The rows of text; `preprocess` replaces those of image tokens."""
        return self.model.embed_input_ids(input_ids)

    def preprocess(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None, spans: list[RequestSpan]
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        assert inputs_embeds is not None, "this stage needs the engine argument enable_prompt_embeds: true"
        rows = [row for span in spans for row in range(_first_generated(span), span.stop)]
        if rows:
            where = async_tensor_h2d(rows, dtype=torch.int64, device=input_ids.device)
            inputs_embeds[where] = self.generation_aligner(self.generation_embeddings(input_ids[where]))
        return inputs_embeds, {}

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """`[N, vocab]`; ids that are no image tokens are never sampled."""
        logits = self.generation_head(hidden_states)
        return F.pad(logits, (0, self.vocab_size - logits.shape[1]), value=float("-inf"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _first_generated(span: RequestSpan) -> int:
    """The first row of the step's flat batch that is not of the request's prompt."""
    return span.start + max(0, span.num_prompt_tokens - span.position)
