# SPDX-License-Identifier: Apache-2.0
"""The base of both thinkers: input embeddings in the order of their tokens, kept for what the talker reads.

It precedes vLLM's class in the bases.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from vllm.model_executor.models.interfaces import MultiModalEmbeddings
from vllm.multimodal.utils import get_mm_embedding_modalities, set_mm_embedding_modality
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from vllm_omni.model_executor.interfaces import RequestSpan


class QwenOmniThinker(nn.Module):
    """
    Attributes:
        media_token_ids: The placeholder of each modality.
        placeholder_ids: The same on the model's device.
    """

    omni_output_rows: ClassVar[Literal["all", "generated"]] = "all"
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

    def preprocess(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None, spans: list[RequestSpan]
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Keeps a copy of the input embeddings, since the first layer's norm overwrites them.

        Returns:
            Outputs `embeds` and, where the step has rows of a prompt, `is_placeholder`.
        """
        if not any(span.emits_rows for span in spans):
            return inputs_embeds, {}
        rows = {"embeds": self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()}
        if any(span.position < span.num_prompt_tokens for span in spans):
            rows["is_placeholder"] = self._find_placeholders(input_ids, spans)
        return inputs_embeds, rows

    def _find_placeholders(self, input_ids: torch.Tensor, spans: list[RequestSpan]) -> torch.Tensor:
        """`[num_tokens]` bool: media placeholders of prompts. A generated token of the same id is none."""
        is_placeholder = torch.isin(input_ids, self.placeholder_ids)
        for span in spans:
            prompt_rows = max(0, span.num_prompt_tokens - span.position)
            is_placeholder[span.start + prompt_rows : span.stop] = False
        return is_placeholder


def in_token_order(
    input_ids: torch.Tensor,
    embeddings: MultiModalEmbeddings | None,
    is_multimodal: torch.Tensor | None,
    token_ids: Mapping[str, int],
) -> MultiModalEmbeddings | None:
    """One embedding for each run of equal placeholders, in the order of the tokens.

    vLLM 0.32 passes one embedding for each item, and decides from the step's tokens whether a video's audio is
    interleaved with it. Where a chunked prefill cuts the video so that its part in the step looks like a video followed
    by audio, vLLM's models assign the embeddings to the wrong tokens. One embedding for each run is not ambiguous.

    Args:
        input_ids: `[num_tokens]`, of all requests of a step.
        embeddings: `[n, width]` each, with the modality that vLLM sets on it; each modality's in their order.
        is_multimodal: `[num_tokens]` bool, on the CPU: the tokens that these embeddings are for.
        token_ids: The placeholder of each modality.

    Returns:
        `embeddings`, unchanged unless both audio and video are among them.
    """
    if embeddings is None or is_multimodal is None:
        return embeddings
    modalities = get_mm_embedding_modalities(list(embeddings))
    if not {"audio", "video"} <= set(modalities):
        return embeddings
    rows = {
        modality: torch.cat([rows for rows, name in zip(embeddings, modalities, strict=True) if name == modality])
        for modality in set(modalities)
    }
    with gpu_sync_allowed():
        placeholders = input_ids.cpu()[is_multimodal]
    ids, counts = torch.unique_consecutive(placeholders, return_counts=True)
    names = {token_ids[modality]: modality for modality in rows}
    ordered = []
    for name, count in zip((names[token_id] for token_id in ids.tolist()), counts.tolist(), strict=True):
        ordered.append(set_mm_embedding_modality(rows[name][:count], name))
        rows[name] = rows[name][count:]
    return ordered
