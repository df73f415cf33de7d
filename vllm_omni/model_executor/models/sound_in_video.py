# SPDX-License-Identifier: Apache-2.0
"""Brings embeddings of media into the order of the tokens that they are for, where sound is woven into a video.

vLLM 0.32 gives a model one embedding for each item, and looks at the step's tokens to tell whether a video's sound is
woven into it. Where a chunked prefill has cut the video so that its part in the step looks like a video and a sound one
after the other, both of Qwen's omni models hand the embeddings to the wrong tokens. Nothing can go wrong with one
embedding for each run of tokens, in their order.
"""

from collections.abc import Mapping

import torch
from vllm.model_executor.models.interfaces import MultiModalEmbeddings
from vllm.multimodal.utils import get_mm_embedding_modalities, set_mm_embedding_modality
from vllm.utils.gpu_sync_debug import gpu_sync_allowed


def in_token_order(
    input_ids: torch.Tensor,
    embeddings: MultiModalEmbeddings | None,
    is_multimodal: torch.Tensor | None,
    token_ids: Mapping[str, int],
) -> MultiModalEmbeddings | None:
    """
    Args:
        input_ids: `[num_tokens]`, of all requests of a step.
        embeddings: `[n, width]` each, with the modality that vLLM notes on it; each modality's in their order.
        is_multimodal: `[num_tokens]` bool, on the CPU: the tokens that these embeddings are for.
        token_ids: By modality, the placeholder.

    Returns:
        `embeddings`, as they are unless both audio and video are among them.
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
