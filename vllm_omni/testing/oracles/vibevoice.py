# SPDX-License-Identifier: Apache-2.0
"""VibeVoice in transformers 5.19, for prompts as this package takes them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    VibeVoiceForConditionalGeneration,
    VibeVoiceProcessor,
)


@dataclass(frozen=True)
class Speech:
    """
    Attributes:
        token_ids: All that were sampled, with the end of the speech if it has ended.
        audio: float32 `[samples]` at 24 kHz; empty where the first token is the end.
    """

    token_ids: list[int]
    audio: torch.Tensor


class VibeVoiceReference:
    """Greedy speech of one prompt after the other. Its noise is drawn from torch's generator after `manual_seed`.

    One error is repaired: with a `guidance_scale` transformers also guides the tokens, by a sequence that reads the
    tokens of frames as if they were text. The authors' implementation guides frames only.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self.processor: Any = VibeVoiceProcessor.from_pretrained(path)
        self.model: Any = VibeVoiceForConditionalGeneration.from_pretrained(path, dtype=dtype).eval()
        self.model._get_logits_processor = self._get_logits_processor

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = type(self.model)._get_logits_processor(self.model, *args, **kwargs)
        kept = [p for p in processors if not isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor)]
        return LogitsProcessorList(kept)

    def read_prompt(self, prompt: Mapping[str, Any]) -> Any:
        """The model's input: `input_ids` `[1, rows]`, and `input_values` `[voices, 1, samples]`."""
        return self.processor.apply_chat_template(
            as_conversation(prompt),
            tokenize=True,
            return_dict=True,
            processor_kwargs={"sampling_rate": 24000, "return_tensors": "pt"},
        )

    @torch.no_grad()
    def speak(self, prompt: Mapping[str, Any], max_frames: int, seed: int = 0) -> Speech:
        """
        Args:
            prompt: `prompt`, a text or a script, and `ref_audio`, `context`, `guidance_scale` in
                `additional_information`; sounds at 24 kHz, mono.
            seed: Of the noise.
        """
        inputs = self.read_prompt(prompt)
        config = self.model.config
        scale = (prompt.get("additional_information") or {}).get("guidance_scale")
        torch.manual_seed(seed)
        # The reference would go on to the end of the text: see `docs/models.md`.
        made = self.model.generate(
            **inputs,
            max_new_tokens=max_frames,
            eos_token_id=[config.audio_eos_token_id, config.eos_token_id],
            return_dict_in_generate=True,
            **({} if scale is None else {"guidance_scale": scale}),
        )
        (audio,) = made.audio
        sampled = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Speech(sampled, torch.empty(0) if audio is None else audio[0])


def as_conversation(prompt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt in the form of the processor's chat template: speakers are counted from 0."""
    given = prompt.get("additional_information") or {}
    marked = re.findall(r"Speaker (\d): (.*)", prompt["prompt"])
    turns = marked or [(given.get("speaker", "0"), prompt["prompt"])]
    sounds = {turn["speaker"]: turn["audio"] for turn in given.get("context", [])}
    if "ref_audio" in given:
        sounds[turns[0][0]] = given["ref_audio"]
    first = min(int(speaker) for speaker, _ in turns)
    conversation = []
    for speaker, text in turns:
        sound = sounds.pop(speaker, None)
        audio = [] if sound is None else [{"type": "audio", "audio": sound[0].numpy()}]
        content = [{"type": "text", "text": text}, *audio]
        conversation.append({"role": str(int(speaker) - first), "content": content})
    return conversation
