# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's cases."""

from typing import Any

import torch
from transformers import PretrainedConfig

from tests.model_executor.models.omni import OmniCase
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import ThinkerToTalker


class Case(OmniCase):
    to_talker = ThinkerToTalker

    def thinker_rows(self, config: PretrainedConfig) -> torch.Tensor:
        prompt_ids = torch.tensor(self.expected.prompt_token_ids)
        thinker = config.thinker_config
        placeholders = torch.tensor([thinker.audio_token_index, thinker.image_token_index, thinker.video_token_index])
        embeds = self.expected.thinker_states(0).clone()
        embeds[torch.isin(prompt_ids, placeholders).nonzero().flatten()] = 0
        return embeds + self.expected.thinker_states(-1)

    def check_speech(self, output: Any) -> None:
        super().check_speech(output)
        assert output.multimodal_output == {}

    @property
    def uses_audio_in_video(self) -> bool:
        return self.prompt.get("mm_processor_kwargs", {}).get("use_audio_in_video", False)

    def mm_metadata(self) -> dict[str, torch.Tensor]:
        metadata = super().mm_metadata()
        if "video_grid_thw" in metadata:
            metadata["use_audio_in_video"] = torch.tensor([self.uses_audio_in_video])
        return metadata
