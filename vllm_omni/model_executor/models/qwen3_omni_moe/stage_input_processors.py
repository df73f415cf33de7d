# SPDX-License-Identifier: Apache-2.0
"""How Qwen3-Omni's stages feed each other: thinker to talker, talker to vocoder.

They select rows and compute positions; everything that needs weights happens in the consumer's model.
Reference: `Qwen3OmniMoeForConditionalGeneration.generate` of HF transformers.
"""

from types import SimpleNamespace
from typing import ClassVar

import torch
from transformers import PretrainedConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration,
)

from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.layers.frames_to_codec import FramesToCodec
from vllm_omni.model_executor.models.qwen3_omni_moe.talker_prompt import NUM_HEADER_ROWS, NUM_TAIL_ROWS, ThinkerRows
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import (
    QwenOmniThinkerToTalker,
    RopeIndex,
    find_speaker,
)

DEFAULT_SPEAKER = "ethan"


def find_user_positions(prompt_ids: torch.Tensor, im_start_id: int, user_id: int) -> torch.Tensor:
    """`[len]` prompt ids -> `[users]` int64, the positions of all user turns, their headers included.

    A position belongs to the turn of the last `<|im_start|>` at or before it (before the first one: to
    that of position 0); the id after that `<|im_start|>` is the turn's role.
    """
    positions = torch.arange(prompt_ids.shape[0])
    starts = torch.where(prompt_ids == im_start_id, positions, 0).cummax(0).values
    roles = prompt_ids[(starts + 1).clamp_max(prompt_ids.shape[0] - 1)]
    return torch.nonzero(roles == user_id).flatten()


def find_reply_start(prompt_ids: torch.Tensor, im_start_id: int, assistant_id: int) -> int | None:
    """Position of the last `<|im_start|>assistant` of a prompt; None without one."""
    headers = (prompt_ids[:-1] == im_start_id) & (prompt_ids[1:] == assistant_id)
    found = torch.nonzero(headers).flatten()
    return int(found[-1]) if found.numel() else None


class ThinkerToTalker(QwenOmniThinkerToTalker):
    """The talker's prompt holds the user's turns."""

    # Without use_audio_in_video: the reference does not pass it to its talker either.
    mm_metadata_keys: ClassVar[tuple[str, ...]] = (
        "image_grid_thw",
        "video_grid_thw",
        "second_per_grid_ts",
        "audio_feature_lengths",
    )

    def __init__(self, hf_config: PretrainedConfig) -> None:
        super().__init__(hf_config)
        talker = hf_config.talker_config
        self.talker_config = talker
        self.placeholder_ids = torch.tensor([talker.audio_token_id, talker.image_token_id, talker.video_token_id])
        # The reference calls the method on its talker; it reads only these fields.
        rope_config = SimpleNamespace(
            image_token_id=talker.image_token_id,
            video_token_id=talker.video_token_id,
            audio_token_id=talker.audio_token_id,
            vision_start_token_id=talker.vision_start_token_id,
            audio_start_token_id=talker.audio_start_token_id,
            position_id_per_seconds=talker.position_id_per_seconds,
            # The reference looks for it in the talker's configuration, which has none, and fails.
            audio_config=hf_config.thinker_config.audio_config,
        )
        merge_size = hf_config.thinker_config.vision_config.spatial_merge_size
        self._rope_index = RopeIndex(Qwen3OmniMoePreTrainedModelForConditionalGeneration, rope_config, merge_size)

    def validate(self, request: StageRequest) -> None:
        super().validate(request)
        self._find_reply_start(request, torch.tensor(request.prompt_token_ids))

    def num_ready_tokens(self, request: StageRequest, num_generated: int) -> int:
        prompt_ids = torch.tensor(request.prompt_token_ids)
        num_reply_rows = len(prompt_ids) - self._find_reply_start(request, prompt_ids) + num_generated - 1
        num_text_rows = num_reply_rows - NUM_HEADER_ROWS - 1
        return self._find_user(prompt_ids).shape[0] + NUM_TAIL_ROWS + num_text_rows

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(sorted(self.talker_config.speaker_id, key=lambda name: (name != DEFAULT_SPEAKER, name)))

    def empty_output(self) -> dict[str, torch.Tensor]:
        return {"codes": torch.empty(0, self.talker_config.num_code_groups, dtype=torch.int64)}

    def _find_reply_start(self, request: StageRequest, prompt_ids: torch.Tensor) -> int:
        config = self.hf_config
        start = find_reply_start(prompt_ids, config.im_start_token_id, config.assistant_token_id)
        if start is None or len(prompt_ids) - start < NUM_HEADER_ROWS:
            raise InvalidRequestError(
                "the prompt has no assistant turn that could be spoken; end it with the chat template's "
                "generation prompt, or ask for text only",
                request.request_id,
            )
        return start

    def _find_user(self, prompt_ids: torch.Tensor) -> torch.Tensor:
        """`[users]`, positions of the user's turns."""
        return find_user_positions(prompt_ids, self.hf_config.im_start_token_id, self.hf_config.user_token_id)

    def make_prompt(self, request: StageRequest, rows: torch.Tensor) -> StageInput | None:
        prompt_ids = torch.tensor(request.prompt_token_ids)
        reply_start, user = self._find_reply_start(request, prompt_ids), self._find_user(prompt_ids)
        if rows.shape[0] - reply_start <= NUM_HEADER_ROWS:
            return None
        user_ids = prompt_ids[user]
        thinker_rows = ThinkerRows(
            user_rows=rows[user],
            user_is_placeholder=torch.isin(user_ids, self.placeholder_ids),
            reply_rows=rows[reply_start:],
            speaker_id=self.talker_config.speaker_id[find_speaker(request, self.voices)],
        )
        # Computed as the thinker's but over the talker's own prompt.
        tail = user_ids.new_full((NUM_TAIL_ROWS,), self.hf_config.tts_pad_token_id)
        positions = self._rope_index(torch.cat((user_ids, tail)), request.mm_metadata)
        return StageInput(
            # A prompt id that is never sampled, so that the repetition penalty counts generated codes only.
            prompt_token_ids=[self.talker_config.codec_pad_id] * (user.shape[0] + NUM_TAIL_ROWS),
            additional_information=thinker_rows.to_information() | {"mrope_positions": positions},
            token_information=["user_rows", "user_is_placeholder"],
            stop_token_ids=[self.talker_config.codec_eos_token_id],
        )


class TalkerToCode2Wav(FramesToCodec):
    """The talker's frames become the vocoder's input."""
