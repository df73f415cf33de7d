# SPDX-License-Identifier: Apache-2.0
"""The thinker: vLLM's own model, which also hands each token to the talker; positions of audio in video are mended.

The talker reads one vector for each token of the conversation: the input embedding (zero where a token of the prompt
stands for media) plus the last hidden state after the final norm. It is emitted under the name `talker_input`.
Reference: `Qwen2_5OmniForConditionalGeneration.generate` of HF transformers.
"""

from typing import ClassVar, Literal

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration
from vllm.multimodal.inputs import MultiModalFeatureSpec

from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.model_executor.models.media_tokens import MediaTokensMixin
from vllm_omni.model_executor.models.qwen2_5_omni.rope import MM_KEYS, RopeIndex

TALKER_INPUT = "talker_input"
"""The thinker's output: `[rows, thinker_hidden]`, a row for each token of the prompt and the reply but the last."""


class OmniQwen2_5OmniThinker(MediaTokensMixin, Qwen2_5OmniThinkerForConditionalGeneration):
    """Understands text, audio, images and video, answers in text, and emits what the talker reads."""

    omni_output_rows: ClassVar[Literal["all", "generated"]] = "all"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        self.set_media_token_ids(config.audio_token_index, config.image_token_index, config.video_token_index)
        self.rope_index = RopeIndex(config)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """vLLM's, except where a video carries its sound.

        There vLLM 0.32 takes `<|audio_bos|>`, where its placeholder starts, for the first token of the video, and
        counts `<|vision_bos|>` and `<|audio_bos|>` as two positions; in the reference they share one.
        """
        media = _media_fields(mm_features)
        uses_audio_in_video = media.get("use_audio_in_video")
        if uses_audio_in_video is None or not uses_audio_in_video.any():
            return super().get_mrope_input_positions(input_tokens, mm_features)
        positions = self.rope_index(torch.tensor(input_tokens), media)
        return positions, int(positions.max()) + 1 - len(input_tokens)

    def preprocess(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None, spans: list[RequestSpan]
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Keeps the input embeddings: the first layer's norm writes over them."""
        if not any(span.emits_rows for span in spans):
            return inputs_embeds, {}
        rows = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        if any(span.position < span.num_prompt_tokens for span in spans):
            rows.masked_fill_(self.find_placeholders(input_ids, spans)[:, None], 0.0)
        return inputs_embeds, {TALKER_INPUT: rows}

    def make_omni_output(
        self,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        preprocessed: dict[str, torch.Tensor],
        spans: list[RequestSpan],
    ) -> dict[str, torch.Tensor]:
        return {TALKER_INPUT: preprocessed[TALKER_INPUT] + hidden_states}


def _media_fields(mm_features: list[MultiModalFeatureSpec]) -> dict[str, torch.Tensor]:
    """What positions depend on, stacked in prompt order."""
    fields: dict[str, list[torch.Tensor]] = {}
    for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
        assert feature.data is not None
        for key in MM_KEYS:
            if key in feature.data:
                value = feature.data[key].data
                assert isinstance(value, torch.Tensor)
                fields.setdefault(key, []).append(value)
    return {key: torch.stack(values) for key, values in fields.items()}
