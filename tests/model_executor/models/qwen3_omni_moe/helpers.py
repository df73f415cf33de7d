# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share beside fixtures."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from tests.model_executor.models.engines import TIGHT
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.models.qwen3_omni_moe.stage_input_processors import ThinkerToTalker
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import TALKER_INPUT
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.testing.hf_oracle import OracleResult

THINKER_TOKENS, TALKER_TOKENS = 20, 40
TALKER_ENGINE_ARGS: dict[str, Any] = {
    "model_arch": "Qwen3OmniMoeTalkerForConditionalGeneration",
    "hf_config_name": "talker_config",
    "engine_output_type": "codes",
    "enable_prompt_embeds": True,
    **TIGHT,
}


@dataclass
class Case:
    """One prompt and what HF makes of it.

    Attributes:
        prompt: As vLLM takes it.
        inputs: As HF takes it.
    """

    prompt: dict[str, Any]
    inputs: dict[str, Any]
    expected: OracleResult

    def thinker_rows(self, config: PretrainedConfig) -> torch.Tensor:
        """The rows that the talker reads, by the definition: `[prompt + reply - 1, hidden]`."""
        prompt_ids = torch.tensor(self.expected.prompt_token_ids)
        thinker = config.thinker_config
        placeholders = torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id])
        rows = self.expected.thinker_states(0).clone()
        media = torch.isin(prompt_ids, placeholders).nonzero().flatten()
        rows[media] = self.expected.thinker_states(config.talker_config.accept_hidden_layer)[media]
        return rows

    def stage_request(self, request_id: str = "0", **options: Any) -> StageRequest:
        names = {
            "image_grid_thw": "image_grid_thw",
            "video_grid_thw": "video_grid_thw",
            "video_second_per_grid": "second_per_grid_ts",
        }
        metadata = {ours: self.inputs[hf] for hf, ours in names.items() if hf in self.inputs}
        if "feature_attention_mask" in self.inputs:
            metadata["audio_feature_lengths"] = self.inputs["feature_attention_mask"].sum(1)
        return StageRequest(
            request_id=request_id,
            prompt_token_ids=self.expected.prompt_token_ids,
            mm_metadata=metadata,
            options=options,
        )

    def thinker_output(self, config: PretrainedConfig) -> StageOutput:
        return StageOutput(
            request_id="0",
            stage_id=0,
            prompt_token_ids=self.expected.prompt_token_ids,
            completions=[Completion(token_ids=self.expected.thinker_token_ids)],
            tensors={TALKER_INPUT: self.thinker_rows(config)},
        )

    def talker_input(self, config: PretrainedConfig) -> StageInput:
        made = ThinkerToTalker(config).process(self.stage_request(), {0: self.thinker_output(config)})
        assert made is not None
        return made
