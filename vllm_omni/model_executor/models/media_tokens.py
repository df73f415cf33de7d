# SPDX-License-Identifier: Apache-2.0
"""What the thinkers of Qwen's omni models share: they know which tokens stand for media.

To be put before vLLM's class among the bases.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.interfaces import MultiModalEmbeddings

from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.model_executor.models.sound_in_video import in_token_order


class MediaTokensMixin(nn.Module):
    """
    Attributes:
        media_token_ids: By modality, the placeholder.
        placeholder_ids: The same on the model's device.
    """

    media_token_ids: dict[str, int]
    placeholder_ids: torch.Tensor

    def set_media_token_ids(self, audio: int, image: int, video: int) -> None:
        """Call once the module is built."""
        self.media_token_ids = {"audio": audio, "image": image, "video": video}
        self.register_buffer("placeholder_ids", torch.tensor([audio, image, video]), persistent=False)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's, with embeddings in the order of their tokens."""
        ordered = in_token_order(input_ids, multimodal_embeddings, is_multimodal, self.media_token_ids)
        parent: Any = super()
        return parent.embed_input_ids(input_ids, ordered, is_multimodal=is_multimodal)

    def find_placeholders(self, input_ids: torch.Tensor, spans: list[RequestSpan]) -> torch.Tensor:
        """`[num_tokens]` bool: media placeholders of prompts (a generated id means nothing of the kind)."""
        is_placeholder = torch.isin(input_ids, self.placeholder_ids)
        for span in spans:
            prompt_rows = max(0, span.num_prompt_tokens - span.position)
            is_placeholder[span.start + prompt_rows : span.stop] = False
        return is_placeholder
