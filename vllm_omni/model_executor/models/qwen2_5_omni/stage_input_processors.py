# SPDX-License-Identifier: Apache-2.0
"""How Qwen2.5-Omni's stages feed each other: thinker to talker, talker to vocoder.

They select rows and compute positions; everything that needs weights happens in the consumer's model.
Reference: `Qwen2_5OmniForConditionalGeneration.generate` of HF transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniPreTrainedModelForConditionalGeneration

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.models.qwen2_5_omni.speakers import DEFAULT_SPEAKER, load_speakers
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import (
    REPLY_ROWS,
    QwenOmniThinkerToTalker,
    RopeIndex,
    find_speaker,
)
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput

PROMPT_ROWS = "prompt_rows"
SPEAKER = "speaker"

MM_KEYS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "audio_feature_lengths", "use_audio_in_video")
"""The fields of a prompt's media that positions depend on, by vLLM's names."""

NUM_TAIL_ROWS = 2
"""Rows of the talker's prompt after the thinker's: the voice, and the first token of the reply."""


def make_rope_index(thinker_config: Any) -> RopeIndex:
    """Thinker and talker use the same positions."""
    merge_size = thinker_config.vision_config.spatial_merge_size
    return RopeIndex(Qwen2_5OmniPreTrainedModelForConditionalGeneration, thinker_config, merge_size)


def speaker_names(hf_config: PretrainedConfig) -> tuple[str, ...]:
    """The voices of the checkpoint that has this configuration, in lower case, the default one first."""
    if not hf_config.name_or_path:
        raise ValueError("the configuration has no name_or_path, where the checkpoint's voices would be found")
    revision = getattr(hf_config, "omni_revision", None)
    return tuple(sorted(load_speakers(hf_config.name_or_path, revision), key=lambda name: name != DEFAULT_SPEAKER))


class ThinkerToTalker(QwenOmniThinkerToTalker):
    """The talker's prompt holds the whole conversation."""

    mm_metadata_keys: ClassVar[tuple[str, ...]] = MM_KEYS

    def __init__(self, hf_config: PretrainedConfig) -> None:
        super().__init__(hf_config)
        self.talker_config = hf_config.talker_config
        self._voices = speaker_names(hf_config)
        self._rope_index = make_rope_index(hf_config.thinker_config)

    @property
    def voices(self) -> tuple[str, ...]:
        return self._voices

    def num_ready_tokens(self, request: StageRequest, num_generated: int) -> int:
        return len(request.prompt_token_ids) + NUM_TAIL_ROWS + num_generated - 2  # The first row is in the prompt.

    def make_prompt(self, request: StageRequest, rows: torch.Tensor) -> StageInput | None:
        config, num_prompt_rows = self.talker_config, len(request.prompt_token_ids)
        speaker = find_speaker(request, self.voices)
        if rows.shape[0] <= num_prompt_rows:
            return None
        return StageInput(
            # What the reference counts in its repetition penalty.
            prompt_token_ids=[config.tts_codec_mask_token_id] * num_prompt_rows
            + [config.tts_codec_pad_token_id, config.tts_codec_start_token_id],
            additional_information={
                PROMPT_ROWS: rows[:num_prompt_rows],
                REPLY_ROWS: rows[num_prompt_rows:],
                SPEAKER: speaker,
                "mrope_positions": self._mrope_positions(request),
            },
            token_information=[PROMPT_ROWS],
            stop_token_ids=[config.tts_codec_pad_token_id, config.tts_codec_end_token_id],
        )

    def _mrope_positions(self, request: StageRequest) -> torch.Tensor:
        """`[3, P + NUM_TAIL_ROWS]` int64, the thinker's and two of text.

        The reference computes them over the voice's token and the reply's first one, and fails where the latter is one
        that precedes media. Both rows are text.
        """
        tail = [self.talker_config.tts_text_pad_token_id] * NUM_TAIL_ROWS
        return self._rope_index(torch.tensor([*request.prompt_token_ids, *tail]), request.mm_metadata)


class TalkerToToken2Wav(StageInputProcessor):
    """The talker's tokens become the vocoder's input: one placeholder id for each code.

    Tokens that are no codes are left out: the end of speech, and the control tokens of a talker that was sampled at a
    high temperature.
    """

    reads: ClassVar[tuple[str, ...]] = ("completions",)
    window: ClassVar[WindowConfig] = WindowConfig(unit="tokens", right_context=12)  # one block of the solver

    def __init__(self, hf_config: PretrainedConfig) -> None:
        super().__init__(hf_config)
        self.speakers = speaker_names(hf_config)
        talker = hf_config.talker_config
        self._num_codes: int = hf_config.token2wav_config.dit_config.num_embeds
        self._stop_ids = torch.tensor([talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id])

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
        """
        Returns:
            None where there is nothing to do: the window has no codes, and no window before it has to be completed.

        Raises:
            InvalidRequestError: The speaker is unknown.
        """
        (window,) = sources.values()
        codes = self._find_codes(window)
        is_end = window.is_last and window.start > 0
        if codes.shape[0] == 0 and not is_end:
            return None
        information: dict[str, Any] = {"codes": codes, SPEAKER: find_speaker(request, self.speakers)}
        if request.sampling_params is not None and request.sampling_params.seed is not None:
            information["seed"] = request.sampling_params.seed
        return StageInput(
            prompt_token_ids=[0] * max(1, codes.shape[0]),
            additional_information=information,
            finish_reason=window.finish_reason,
        )

    def empty_output(self) -> dict[str, torch.Tensor]:
        return {"audio": torch.empty(0)}

    def _find_codes(self, window: StageOutput) -> torch.Tensor:
        """`[T]` int64, the codes that the window adds."""
        if not window.completions:
            return torch.empty(0, dtype=torch.int64)
        tokens = torch.tensor(window.completions[0].token_ids[window.context :], dtype=torch.int64)
        return tokens[(tokens < self._num_codes) & ~torch.isin(tokens, self._stop_ids)]
