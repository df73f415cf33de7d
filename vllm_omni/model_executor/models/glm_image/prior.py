# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's autoregressive model: makes the tokens of an image, which its DiT reads, one for 32 x 32 pixels.

GLM-4's layers with M-RoPE. Input images are read as tokens of the same kind: a vision tower and a codebook make them.

Reference: `GlmImageForConditionalGeneration` of HF transformers. This file knows no engine.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.glm_image.modeling_glm_image import GlmImageVisionModel, GlmImageVQVAE
from vllm.config import VllmConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.glm4 import Glm4ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_omni.model_executor.feedback import FedBack, FedBackRows, FeedbackStrategy, InputPiece, RequestInput


class OmniGlmImage(Glm4ForCausalLM):
    """A language model whose head has image tokens only; its embedding has text as well."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: Any = vllm_config.model_config.hf_config
        text_config, dtype = config.text_config, vllm_config.model_config.dtype
        head_config = copy.copy(text_config)
        head_config.update({"vocab_size": text_config.vision_vocab_size, "tie_word_embeddings": False})
        super().__init__(
            vllm_config=vllm_config.with_hf_config(head_config, architectures=["Glm4ForCausalLM"]), prefix=prefix
        )
        self.config = config
        self.model.embed_tokens = VocabParallelEmbedding(text_config.vocab_size, text_config.hidden_size)
        layers: Any = self.model.layers
        for layer in layers:  # GLM-4 rotates neighbouring channels, this model the two halves.
            layer.self_attn.rotary_emb = get_rope(
                layer.self_attn.head_dim,
                text_config.max_position_embeddings,
                rope_parameters=text_config.rope_parameters,
            )
        self.visual = GlmImageVisionModel._from_config(config.vision_config, dtype=dtype)
        self.vqmodel = GlmImageVQVAE._from_config(config.vq_config, dtype=dtype)
        self.hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_prefix={
                "model.language_model.": "model.",
                "model.visual.": "visual.",
                "model.vqmodel.": "vqmodel.",
            }
        )

    def make_feedback_strategy(self, max_batch_size: int) -> "GlmImageFeedback":
        return GlmImageFeedback(self)

    def encode_images(self, pixel_values: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """
        Args:
            pixel_values: `[patches, channels * patch * patch]`, all images one after the other.
            grids: int64 `[images, 3]`, their patches: 1, height and width.

        Returns:
            int64 `[patches]`, the patches' tokens.
        """
        rows = self.visual(pixel_values.to(self.visual.dtype), grid_thw=grids).pooler_output
        sizes = grids[:, 1:].tolist()
        images = rows.split([height * width for height, width in sizes])
        features = [image.T.unflatten(1, size) for image, size in zip(images, sizes, strict=True)]
        return torch.cat([self.vqmodel.encode(each[None]).image_tokens for each in features])

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The head's logits, padded to the vocabulary of text, which vLLM's sampler counts with."""
        logits = super().compute_logits(hidden_states)
        if logits is None:
            return None
        return F.pad(logits, (0, self.config.text_config.vocab_size - logits.shape[1]), value=float("-inf"))

    def suppressed_tokens(self) -> torch.Tensor:
        """See `SupportsSuppressedTokens`: all but image tokens, since the DiT can read no others."""
        ids = torch.arange(self.config.text_config.vocab_size, device=next(self.parameters()).device)
        return ids >= self.config.vq_config.num_embeddings


class GlmImageFeedback(FeedbackStrategy):
    """Emits `image_ids`, int64 `[patches]`, the tokens of the request's input images, with the first token."""

    def __init__(self, model: OmniGlmImage) -> None:
        self._model = model
        self._prompts: dict[int, torch.Tensor] = {}
        self._image_ids: dict[int, torch.Tensor] = {}

    def begin(self, slot: int, request: RequestInput) -> None:
        """Reads the information of a `GlmImagePromptProcessor`."""
        device = next(self._model.parameters()).device
        token_ids = torch.tensor(request.token_ids, device=device)
        if "pixel_values" in request.information:
            pixel_values, grids = (request.information[name].to(device) for name in ("pixel_values", "image_grid_thw"))
            image_ids = self._model.encode_images(pixel_values, grids)
            token_ids[token_ids == self._model.config.image_token_id] = image_ids
            self._image_ids[slot] = image_ids
        self._prompts[slot] = token_ids

    def extend(self, pieces: list[InputPiece]) -> None:
        """A prompt is complete when it arrives."""

    def end(self, slot: int) -> None:
        self._prompts.pop(slot, None)
        self._image_ids.pop(slot, None)

    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self._model.embed_input_ids(self._prompts[slot][start:stop])

    def first_outputs(self, slot: int) -> dict[str, torch.Tensor]:
        return {"image_ids": self._image_ids[slot]} if slot in self._image_ids else {}

    def feed_back(self, rows: FedBackRows) -> FedBack:
        return FedBack(self._model.embed_input_ids(rows.token_ids), {})

    def replay(self, rows: FedBackRows) -> FedBack:
        return self.feed_back(rows)

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Nothing is computed from them but the next token."""
