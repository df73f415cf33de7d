# SPDX-License-Identifier: Apache-2.0
"""M-RoPE positions as the reference computes them, from token ids and the media's sizes.

Calls the method of HF transformers' models itself, on an object with the few fields that it reads: no weights.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniPreTrainedModelForConditionalGeneration

HFRopeIndex: Any = Qwen2_5OmniPreTrainedModelForConditionalGeneration

MM_KEYS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "audio_feature_lengths", "use_audio_in_video")
"""The fields of a prompt's media that positions depend on, by vLLM's names."""


class RopeIndex:
    """Thinker and talker use the same positions."""

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: The checkpoint's `thinker_config`, a `Qwen2_5OmniThinkerConfig`.
        """
        self._caller = SimpleNamespace(
            config=config,
            spatial_merge_size=config.vision_config.spatial_merge_size,
            get_llm_pos_ids_for_vision=lambda *args: HFRopeIndex.get_llm_pos_ids_for_vision(None, *args),
            get_chunked_index=lambda *args: HFRopeIndex.get_chunked_index(None, *args),
        )

    def __call__(self, token_ids: torch.Tensor, media: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """
        Args:
            token_ids: `[len]` int64, placeholders expanded.
            media: The fields named by `MM_KEYS`, those that the prompt has, stacked in prompt order.

        Returns:
            `[3, len]` int64.
        """
        ids = token_ids[None]
        uses_audio_in_video = media.get("use_audio_in_video")
        positions, _ = HFRopeIndex.get_rope_index(
            self._caller,
            ids,
            media.get("image_grid_thw"),
            media.get("video_grid_thw"),
            torch.ones_like(ids),
            use_audio_in_video=uses_audio_in_video is not None and bool(uses_audio_in_video.any()),
            audio_seqlens=media.get("audio_feature_lengths"),
            second_per_grids=media.get("second_per_grid_ts"),
        )
        return positions[:, 0].long()
