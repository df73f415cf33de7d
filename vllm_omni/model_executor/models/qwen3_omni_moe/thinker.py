# SPDX-License-Identifier: Apache-2.0
"""The thinker: vLLM's own model, which also emits what the talker reads.

The talker reads one vector for each token of the conversation: at placeholders of audio, images or video the state
entering layer `accept_hidden_layer`, everywhere else the input embedding. Only this one is emitted, as `talker_input`.

Indices: HF's `hidden_states[k]` is the output of decoder layer `k - 1` before deepstack features are added;
vLLM's auxiliary state `k` is taken after they were. They are equal for every `k` above the number of
deepstack levels, which this file requires.
"""

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerMultiModalProcessor,
    Qwen3OmniMoeThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.model_executor.models.qwen_omni.processor import PairsSoundWithVideo
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import TALKER_INPUT
from vllm_omni.model_executor.models.qwen_omni.thinker import QwenOmniThinker


class OmniQwen3OmniMoeProcessor(PairsSoundWithVideo, Qwen3OmniMoeThinkerMultiModalProcessor):
    """Preprocesses media."""


@MULTIMODAL_REGISTRY.register_processor(
    OmniQwen3OmniMoeProcessor,
    info=Qwen3OmniMoeThinkerProcessingInfo,
    dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder,
)
class OmniQwen3OmniMoeThinker(QwenOmniThinker, Qwen3OmniMoeThinkerForConditionalGeneration):
    """Understands text, audio, images and video, answers in text, and emits what the talker reads."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        hf_config = vllm_config.model_config.hf_config
        self.omni_aux_hidden_state_layers = self._find_layers(hf_config) if hf_config.enable_audio_output else ()
        self.set_media_token_ids(self.config.audio_token_id, self.config.image_token_id, self.config.video_token_id)

    def _find_layers(self, hf_config: PretrainedConfig) -> tuple[int, ...]:
        """The layers whose states the talker reads."""
        layer = hf_config.talker_config.accept_hidden_layer
        num_layers = len(self.language_model.model.layers)
        if not self.deepstack_num_level < layer < num_layers:
            raise ValueError(
                f"accept_hidden_layer={layer} must be above the {self.deepstack_num_level} deepstack levels "
                f"and below the thinker's {num_layers} layers"
            )
        return (layer,)

    def make_omni_output(
        self,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        preprocessed: dict[str, torch.Tensor],
        spans: list[RequestSpan],
    ) -> dict[str, torch.Tensor]:
        rows = preprocessed["embeds"]
        if "is_placeholder" in preprocessed:
            assert aux_hidden_states is not None
            rows = torch.where(preprocessed["is_placeholder"][:, None], aux_hidden_states[0], rows)
        return {TALKER_INPUT: rows}
