# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share beside fixtures."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import ThinkerToTalker
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import TALKER_INPUT
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.testing.hf_oracle import OracleResult

THINKER_TOKENS, TALKER_TOKENS = 20, 40
SPEAKERS = ("Chelsie", "Ethan", "Aiden")


@dataclass
class Case:
    """One prompt and what HF makes of it.

    Attributes:
        prompt: As vLLM takes it.
        inputs: As HF takes it.
    """

    prompt: dict[str, Any]
    speaker: str
    inputs: dict[str, Any]
    expected: OracleResult

    @property
    def uses_audio_in_video(self) -> bool:
        return self.prompt.get("mm_processor_kwargs", {}).get("use_audio_in_video", False)

    def thinker_rows(self, config: PretrainedConfig) -> torch.Tensor:
        """The rows that the talker reads, by the definition: `[prompt + reply - 1, hidden]`."""
        prompt_ids = torch.tensor(self.expected.prompt_token_ids)
        thinker = config.thinker_config
        placeholders = torch.tensor([thinker.audio_token_index, thinker.image_token_index, thinker.video_token_index])
        embeds = self.expected.thinker_states(0).clone()
        embeds[torch.isin(prompt_ids, placeholders).nonzero().flatten()] = 0
        return embeds + self.expected.thinker_states(-1)

    def mm_metadata(self) -> dict[str, torch.Tensor]:
        names = {
            "image_grid_thw": "image_grid_thw",
            "video_grid_thw": "video_grid_thw",
            "video_second_per_grid": "second_per_grid_ts",
        }
        metadata = {ours: torch.as_tensor(self.inputs[hf]) for hf, ours in names.items() if hf in self.inputs}
        if "feature_attention_mask" in self.inputs:
            metadata["audio_feature_lengths"] = self.inputs["feature_attention_mask"].sum(1)
        if "video_grid_thw" in metadata:
            metadata["use_audio_in_video"] = torch.tensor([self.uses_audio_in_video])
        return metadata

    def stage_request(self, request_id: str = "0", params: SamplingParams | None = None) -> StageRequest:
        return StageRequest(
            request_id=request_id,
            prompt_token_ids=self.expected.prompt_token_ids,
            mm_metadata=self.mm_metadata(),
            options={"speaker": self.speaker},
            sampling_params=params,
        )

    def thinker_output(self, config: PretrainedConfig) -> StageOutput:
        return StageOutput(
            request_id="0",
            stage_id=0,
            completions=[Completion(token_ids=self.expected.thinker_token_ids)],
            tensors={TALKER_INPUT: self.thinker_rows(config)},
        )

    def talker_input(self, config: PretrainedConfig) -> StageInput:
        made = ThinkerToTalker(config).process(self.stage_request(), {0: self.thinker_output(config)})
        assert made is not None
        return made


def loaded_model(engine: OmniLLMEngine) -> Any:
    """The model that an engine of this process runs."""
    return engine._core.model_executor.driver_worker.worker.model_runner.get_model()  # type: ignore[attr-defined]
