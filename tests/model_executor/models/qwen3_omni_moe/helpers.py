# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni's cases."""

from typing import Any

import torch
from transformers import PretrainedConfig

from tests.model_executor.models.omni import OmniCase
from vllm_omni.model_executor.models.qwen3_omni_moe.stage_input_processors import ThinkerToTalker


class Case(OmniCase):
    to_talker = ThinkerToTalker

    def thinker_rows(self, config: PretrainedConfig) -> torch.Tensor:
        prompt_ids = torch.tensor(self.expected.prompt_token_ids)
        thinker = config.thinker_config
        placeholders = torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id])
        rows = self.expected.thinker_states(0).clone()
        media = torch.isin(prompt_ids, placeholders).nonzero().flatten()
        rows[media] = self.expected.thinker_states(config.talker_config.accept_hidden_layer)[media]
        return rows

    def check_speech(self, output: Any) -> None:
        super().check_speech(output)
        codes = output.multimodal_output["codes"]
        assert codes.dtype == torch.int64 and torch.equal(codes, self.expected.codes.T)
