# SPDX-License-Identifier: Apache-2.0
"""CSM's prompt: the turns of a conversation with their sounds, and the text to be spoken.

Reference: `CsmProcessor` of HF transformers, with the checkpoint's chat template.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import CsmProcessor, PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.inputs import StageInput
from vllm_omni.model_executor.prompt_processor import (
    PromptProcessor,
    read_choice,
    read_reference,
    read_sound,
    read_text,
    read_turns,
)

MAX_SECONDS = 120.0
"""Of one sound; all of them must fit into the model's context, of 2048 rows at 12.5 a second."""


class CsmPromptProcessor(PromptProcessor):
    """Voices are the speakers of the conversation, by number; how one sounds is decided by its turns.

    `context` are earlier turns, each a dict of `text`, `audio` (as `read_sound` takes it) and `speaker` (default: the
    request's). `ref_audio` and `ref_text` are one more turn of the request's speaker, before all others.

    Its information: `text_ids`, int64 `[rows]`, the ids of the prompt, with one audio id for each frame of a sound;
    `sounds`, float32 `[samples]`, all sounds one after the other, and `sound_sizes`, int64 `[sounds]`, the samples of
    each.
    """

    fields: ClassVar[tuple[str, ...]] = ("prompt", "speaker", "context", "ref_audio", "ref_text")

    def __init__(self, hf_config: PretrainedConfig, tokenizer: TokenizerLike) -> None:
        super().__init__(hf_config, tokenizer)
        revision = hf_config.omni_revision or "main"
        # It finds the chat template in any form; a tokenizer does not.
        self._processor: Any = CsmProcessor.from_pretrained(str(hf_config.name_or_path), revision=revision)
        codec = hf_config.codec_config
        self._sample_rate = codec.sampling_rate
        self._frame_size = round(codec.sampling_rate / codec.frame_rate)

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple("0123456789")

    def process(self, given: Mapping[str, Any]) -> StageInput:
        text = read_text(given["prompt"], "prompt")
        speaker = read_choice(given.get("speaker", "0"), "speaker", self.voices)
        turns = read_turns(given.get("context", []), ("text", "audio"), ("speaker",))
        if reference := read_reference(given):
            audio, ref_text = reference
            turns.insert(0, ("ref_audio", {"text": ref_text, "audio": audio}))
        sounds = [read_sound(turn["audio"], name, self._sample_rate, MAX_SECONDS) for name, turn in turns]
        messages = [self._message(name, turn, speaker) for name, turn in turns]
        messages.append({"role": speaker, "content": [{"type": "text", "text": text}]})
        text_ids = self._with_frames(self._tokenize(messages), sounds)
        return StageInput(
            # An id that is never sampled, so that penalties count generated codes only.
            prompt_token_ids=[self.hf_config.codebook_pad_token_id] * len(text_ids),
            additional_information={
                "text_ids": torch.tensor(text_ids),
                "sounds": torch.cat([*sounds, torch.zeros(0)]),
                "sound_sizes": torch.tensor([len(sound) for sound in sounds], dtype=torch.int64),
            },
        )

    def _message(self, name: str, turn: Mapping[str, Any], speaker: str) -> dict[str, Any]:
        own = read_choice(str(turn.get("speaker", speaker)), f"{name}: speaker", self.voices)
        text = read_text(turn["text"], f"{name}: text")
        return {"role": own, "content": [{"type": "text", "text": text}, {"type": "audio"}]}

    def _tokenize(self, messages: list[Any]) -> list[int]:
        rendered = self._processor.apply_chat_template(messages, tokenize=False)
        return list(self.tokenizer.encode(rendered, add_special_tokens=False))

    def _with_frames(self, text_ids: list[int], sounds: list[torch.Tensor]) -> list[int]:
        """The ids with one audio id for each frame of each sound."""
        audio_id = self.hf_config.audio_token_id
        if text_ids.count(audio_id) != len(sounds):
            raise ValueError("a text has special tokens of this model; remove them")
        counts = iter([-(-len(sound) // self._frame_size) for sound in sounds])
        return [token for token in text_ids for _ in range(next(counts) if token == audio_id else 1)]
