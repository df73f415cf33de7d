# SPDX-License-Identifier: Apache-2.0
"""The thinker: vLLM's own model, which also emits what the talker reads; positions of audio in video are corrected.

The talker reads one vector for each token of the conversation: the input embedding (zero where a token of the prompt
is a media placeholder) plus the last hidden state after the final norm. Its name is `talker_input`.
Reference: `Qwen2_5OmniForConditionalGeneration.generate` of HF transformers.
"""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec

from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import MM_KEYS, make_rope_index
from vllm_omni.model_executor.models.qwen_omni.processor import PairsSoundWithVideo
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import TALKER_INPUT
from vllm_omni.model_executor.models.qwen_omni.thinker import QwenOmniThinker


class OmniQwen2_5OmniProcessor(PairsSoundWithVideo, Qwen2_5OmniThinkerMultiModalProcessor):
    """Preprocesses media."""


@MULTIMODAL_REGISTRY.register_processor(
    OmniQwen2_5OmniProcessor,
    info=Qwen2_5OmniThinkerProcessingInfo,
    dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder,
)
class OmniQwen2_5OmniThinker(QwenOmniThinker, Qwen2_5OmniThinkerForConditionalGeneration):
    """Understands text, audio, images and video, answers in text, and emits what the talker reads."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        self.set_media_token_ids(config.audio_token_index, config.image_token_index, config.video_token_index)
        self.rope_index = make_rope_index(config)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """vLLM's, except where a video is read with its audio.

        There vLLM 0.32 takes `<|audio_bos|>`, where its placeholder starts, for the first token of the video, and
        counts `<|vision_bos|>` and `<|audio_bos|>` as two positions; in the reference they share one.
        """
        media = _media_fields(mm_features)
        uses_audio_in_video = media.get("use_audio_in_video")
        if uses_audio_in_video is None or not uses_audio_in_video.any():
            return super().get_mrope_input_positions(input_tokens, mm_features)
        positions = self.rope_index(torch.tensor(input_tokens), media)
        return positions, int(positions.max()) + 1 - len(input_tokens)

    def make_omni_output(
        self,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        preprocessed: dict[str, torch.Tensor],
        spans: list[RequestSpan],
    ) -> dict[str, torch.Tensor]:
        rows = preprocessed["embeds"]
        if "is_placeholder" in preprocessed:
            rows.masked_fill_(preprocessed["is_placeholder"][:, None], 0.0)
        return {TALKER_INPUT: rows + hidden_states}


def _media_fields(mm_features: list[MultiModalFeatureSpec]) -> dict[str, torch.Tensor]:
    """The fields of media that positions depend on, stacked in prompt order."""
    fields: dict[str, list[torch.Tensor]] = {}
    for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
        assert feature.data is not None
        for key in MM_KEYS:
            if key in feature.data:
                value = feature.data[key].data
                assert isinstance(value, torch.Tensor)
                fields.setdefault(key, []).append(value)
    return {key: torch.stack(values) for key, values in fields.items()}
