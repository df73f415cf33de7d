# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio's prompt: a scene, a voice to imitate, and the text to be spoken.

Reference: `HiggsAudioV2Processor` of HF transformers, with the checkpoint's chat template.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike

from vllm_omni.inputs import StageInput
from vllm_omni.model_executor.layers.delay_pattern import DelayPattern, read_repeat_limits
from vllm_omni.model_executor.models.higgs_audio_v2.tokenizer import num_sound_frames, read_codec_config
from vllm_omni.model_executor.prompt_processor import PromptProcessor, read_reference, read_sound, read_text

SYSTEM = "Generate audio following instruction."
SCENE = "Audio is recorded from a quiet room."
"""As in the reference's examples."""

MAX_SECONDS = 60.0
"""Of a reference sound, which has 25 rows a second in the model's context of 2048."""


class HiggsAudioPromptProcessor(PromptProcessor):
    """The voice is that of a reference; else the model chooses one, which `instructions`, a scene, can describe.

    Its information: `text_ids`, int64 `[rows]`, the ids of the prompt, with an id for each row of the sound; `sound`,
    float32 `[samples]`, empty without a reference.
    """

    fields: ClassVar[tuple[str, ...]] = ("prompt", "instructions", "ref_audio", "ref_text")

    def __init__(self, hf_config: PretrainedConfig, tokenizer: TokenizerLike) -> None:
        super().__init__(hf_config, tokenizer)
        self._codec: Any = read_codec_config(str(hf_config.name_or_path))

    def process(self, given: Mapping[str, Any]) -> StageInput:
        messages = [("system", SYSTEM), ("scene", read_text(given.get("instructions", SCENE), "instructions"))]
        sound = torch.empty(0)
        if reference := read_reference(given):
            audio, ref_text = reference
            sound = read_sound(audio, "ref_audio", self._codec.sample_rate, MAX_SECONDS)
            messages += [("user", ref_text), ("assistant", "")]
        messages.append(("user", read_text(given["prompt"], "prompt")))
        text_ids = self._with_rows(self._tokenize(messages), len(sound))
        return StageInput(
            # An id that is never sampled, so that penalties count generated codes only.
            prompt_token_ids=[self.hf_config.audio_token_id] * len(text_ids),
            additional_information={"text_ids": torch.tensor(text_ids), "sound": sound},
        )

    def validate(self, params: SamplingParams) -> None:
        read_repeat_limits(params)

    def _tokenize(self, messages: list[tuple[str, str]]) -> list[int]:
        """Messages of roles and texts; that of the assistant is the sound."""
        chat = [
            {"role": role, "content": [{"type": "audio"} if role == "assistant" else {"type": "text", "text": text}]}
            for role, text in messages
        ]
        tokenizer: Any = self.tokenizer
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(rendered, add_special_tokens=False))

    def _with_rows(self, text_ids: list[int], num_samples: int) -> list[int]:
        """The ids with one id for each row of the sound: those in which a codebook has ended already have another."""
        config = self.hf_config
        if text_ids.count(config.audio_token_id) != (num_samples > 0) or config.audio_delay_token_id in text_ids:
            raise ValueError("a text has special tokens of this model; remove them")
        if text_ids[-1] != config.audio_bos_token_id:
            raise ValueError("the checkpoint's chat template does not end with the token that begins speech")
        if not num_samples:
            return text_ids
        pattern = DelayPattern(config.num_codebooks, config.audio_stream_bos_id, config.audio_stream_eos_id)
        num_frames, num_ending = num_sound_frames(self._codec, num_samples), config.num_codebooks - 1
        if num_frames < 1:
            raise ValueError(f"ref_audio is too short: {num_samples} samples")
        num_rows = pattern.num_rows(num_frames)
        where = text_ids.index(config.audio_token_id)
        rows = [config.audio_token_id] * (num_rows - num_ending) + [config.audio_delay_token_id] * num_ending
        return [*text_ids[:where], *rows, *text_ids[where + 1 :]]
