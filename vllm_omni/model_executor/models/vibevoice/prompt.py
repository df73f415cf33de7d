# SPDX-License-Identifier: Apache-2.0
"""VibeVoice's prompt: a script of one or more speakers, and sounds of their voices.

Reference: `VibeVoiceProcessor` of HF transformers, with the checkpoint's chat template.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PretrainedConfig, VibeVoiceProcessor
from vllm.tokenizers import TokenizerLike

from vllm_omni.inputs import StageInput
from vllm_omni.model_executor.prompt_processor import (
    PromptProcessor,
    read_choice,
    read_guidance_scale,
    read_sound,
    read_text,
    read_turns,
)
from vllm_omni.payloads import Guidance

MAX_SECONDS = 60.0
"""Of the sound of one voice."""

_LINE = re.compile(r"speaker\s+(\d+)\s*:\s*(.*)", re.IGNORECASE)


class VibeVoicePromptProcessor(PromptProcessor):
    """Lines that begin with "Speaker 1:" are of that speaker; the model counts speakers from 0. `speaker` says the text
    before the first such line. `ref_audio` is the voice of who speaks first; each turn of `context`, a dict of
    `speaker` (default: the request's) and `audio`, has the voice of one more (its `text` is not read). Besides
    `guidance_scale` (default: the checkpoint's; 1: none).

    Its information: `text_ids`, int64 `[rows]`, with an id for each frame of a voice; `sounds`, float32 `[samples]`,
    all voices one after the other, and `sound_sizes`, int64 `[voices]`, the samples of each; `scale`.
    """

    fields: ClassVar[tuple[str, ...]] = ("prompt", "speaker", "context", "ref_audio", "guidance_scale")

    def __init__(self, hf_config: PretrainedConfig, tokenizer: TokenizerLike) -> None:
        super().__init__(hf_config, tokenizer)
        path, revision = str(hf_config.name_or_path), hf_config.omni_revision
        processor: Any = VibeVoiceProcessor.from_pretrained(path, revision=revision or "main")
        self._processor = processor
        self._specials = (processor.audio_token, processor.audio_bos_token, processor.audio_eos_token)
        self._rate = processor.feature_extractor.sampling_rate
        self._default_scale = float(read_generation_config(path, revision).guidance_scale or 1.0)

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple("0123456789")

    def process(self, given: Mapping[str, Any]) -> StageInput:
        speaker = read_choice(given.get("speaker", "0"), "speaker", self.voices)
        turns = self._read_script(read_text(given["prompt"], "prompt", self._specials), speaker)
        sounds = self._read_voices(given, speaker, turns[0][0])
        silent = sounds.keys() - {speaker for speaker, _ in turns}
        if silent:
            raise ValueError(f"context has a voice of speaker {min(silent)}, who says nothing in the prompt")
        scale = read_guidance_scale(given.get("guidance_scale", self._default_scale))
        first = min(int(speaker) for speaker, _ in turns)
        messages = []
        for number, text in turns:
            audio = [{"type": "audio", "audio": sounds.pop(number).numpy()}] if number in sounds else []
            content = [{"type": "text", "text": text}, *audio]
            messages.append({"role": str(int(number) - first), "content": content})
        made = self._processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            processor_kwargs={"sampling_rate": self._rate, "return_tensors": "pt"},
        )
        text_ids = made["input_ids"][0]
        config = self.hf_config
        return StageInput(
            # An id that is never sampled, so that penalties count generated ids only.
            prompt_token_ids=[config.audio_bos_token_id] * len(text_ids),
            additional_information={"text_ids": text_ids, "scale": scale, **_as_sounds(made)},
            guidance=None if scale == 1 else Guidance([config.audio_bos_token_id], 1.0),
            stop_token_ids=[config.audio_eos_token_id, config.eos_token_id],
        )

    def _read_script(self, script: str, speaker: str) -> list[tuple[str, str]]:
        """Turns of speakers and texts; a line without a speaker goes on with the turn before it."""
        if not any(_LINE.match(line.strip()) for line in script.splitlines()):
            return [(speaker, script)]
        turns: list[tuple[str, str]] = []
        for line in filter(None, map(str.strip, script.splitlines())):
            marked = _LINE.match(line)
            if marked:
                number = read_choice(marked[1], "prompt: speaker", self.voices)
                turns.append((number, read_text(marked[2], f"prompt: what speaker {number} says")))
            elif turns:
                turns[-1] = turns[-1][0], f"{turns[-1][1]} {line}"
            else:
                turns.append((speaker, line))
        return turns

    def _read_voices(self, given: Mapping[str, Any], speaker: str, first: str) -> dict[str, torch.Tensor]:
        """The sounds by speaker."""
        sounds = {}
        if "ref_audio" in given:
            sounds[first] = read_sound(given["ref_audio"], "ref_audio", self._rate, MAX_SECONDS)
        for name, turn in read_turns(given.get("context", []), ("audio",), ("speaker", "text")):
            number = read_choice(str(turn.get("speaker", speaker)), f"{name}: speaker", self.voices)
            if number in sounds:
                raise ValueError(f"{name}: speaker {number} has a voice already")
            sounds[number] = read_sound(turn["audio"], f"{name}: audio", self._rate, MAX_SECONDS)
        return sounds


def _as_sounds(made: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The voices as the processor has normalized them, without its padding."""
    if "input_values" not in made:
        return {"sounds": torch.zeros(0), "sound_sizes": torch.zeros(0, dtype=torch.int64)}
    sizes = made["padding_mask"].sum(-1)
    sounds = [wave[0, :size] for wave, size in zip(made["input_values"], sizes.tolist(), strict=True)]
    return {"sounds": torch.cat(sounds), "sound_sizes": sizes.long()}


def read_generation_config(checkpoint: str, revision: str | None) -> Any:
    """How the checkpoint wants to be sampled: guidance, and the solver of its diffusion head. One of defaults where it
    says nothing."""
    try:
        return GenerationConfig.from_pretrained(checkpoint, revision=revision or "main")
    except OSError:
        return GenerationConfig()
