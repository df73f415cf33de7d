# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's cases."""

from typing import Any

import torch
from transformers import PretrainedConfig

from tests.model_executor.models.omni import OmniCase
from vllm_omni.model_executor.models.qwen2_5_omni.stage_input_processors import PROMPT_ROWS, SPEAKER, ThinkerToTalker
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import REPLY_ROWS


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


def log_probs_of(model: Any, information: dict[str, Any], tokens: list[int]) -> torch.Tensor:
    """What a trainer computes for the tokens of a talker, `[tokens]`, of the rows that it reads: one pass through
    transformers' model.

    Args:
        information: Of the talker's prompt.
    """
    talker, config = model.talker, model.config.talker_config
    dtype, num_steps = talker.codec_head.weight.dtype, len(tokens) - 1
    codec, text = talker.get_input_embeddings(), model.thinker.get_input_embeddings()
    first, later = information[REPLY_ROWS].to(dtype).tensor_split((1,))
    voices = {name.lower(): voice["bos_token"] for name, voice in model.speaker_map.items()}
    texts = [int(voices[information[SPEAKER]]), config.tts_text_end_token_id, config.tts_text_pad_token_id]
    voice, end, padding = text(torch.tensor(texts)).split(1)
    prompt = torch.cat([information[PROMPT_ROWS].to(dtype), voice, first])
    prompt[-2:] += codec(torch.tensor([config.tts_codec_pad_token_id, config.tts_codec_start_token_id]))
    read = torch.cat([later, end, padding.expand(max(0, num_steps - len(later) - 1), -1)])[:num_steps]
    rows = torch.cat([prompt, codec(torch.tensor(tokens[:-1])) + read])
    positions = information["mrope_positions"]
    later_positions = positions.max() + 1 + torch.arange(num_steps)
    hidden = talker.model(
        inputs_embeds=talker.thinker_to_talker_proj(rows)[None],
        position_ids=torch.cat([positions, later_positions.expand(3, -1)], 1)[:, None],
        attention_mask=torch.ones(1, len(rows), dtype=torch.long),
    ).last_hidden_state[0, -len(tokens) :]
    return talker.codec_head(hidden).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
