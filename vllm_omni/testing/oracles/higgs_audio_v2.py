# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio v2 in transformers 5.19, for prompts as this package takes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    DacFeatureExtractor,
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2Processor,
)

from vllm_omni.testing.tiny.higgs_audio_v2 import CODEC, import_codec

SYSTEM = "Generate audio following instruction."
SCENE = "Audio is recorded from a quiet room."


@dataclass(frozen=True)
class Speech:
    """
    Attributes:
        codes: int64 `[rows, codebooks]`, all that were generated: delayed, with the row of start ids, and that of end
            ids if the speech has ended.
        audio: float32 `[samples]` at 24 kHz; empty where the rows have no whole frame.
    """

    codes: torch.Tensor
    audio: torch.Tensor


class HiggsAudioReference:
    """Greedy speech of one prompt after the other."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        folder = Path(path) / CODEC
        tokenizer = AutoTokenizer.from_pretrained(path)
        extractor = DacFeatureExtractor.from_pretrained(folder)
        processor: Any = HiggsAudioV2Processor(extractor, tokenizer, None, chat_template=tokenizer.chat_template)
        self.processor = processor
        self.processor.audio_tokenizer = import_codec().from_pretrained(folder).eval()
        self.model: Any = HiggsAudioV2ForConditionalGeneration.from_pretrained(path, dtype=dtype).eval()
        config = self.model.config
        self.processor.audio_stream_bos_id = config.audio_stream_bos_id
        self.processor.audio_stream_eos_id = config.audio_stream_eos_id

    def read_prompt(self, prompt: Mapping[str, Any]) -> Any:
        """The model's input: `input_ids` `[1, rows]`, and `audio_input_ids` `[1, rows of sound, codebooks]`."""
        return self.processor.apply_chat_template(
            as_conversation(prompt),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            processor_kwargs={"sampling_rate": 24000, "return_tensors": "pt"},
        )

    @torch.no_grad()
    def speak(self, prompt: Mapping[str, Any], max_rows: int) -> Speech:
        """
        Args:
            prompt: `prompt`, and `instructions`, `ref_audio`, `ref_text` in `additional_information`; sounds at 24 kHz,
                mono.
        """
        inputs = self.read_prompt(prompt)
        codes = self.model.generate(**inputs, max_new_tokens=max_rows, do_sample=False)[0]
        given = inputs.get("audio_input_ids")
        codes = codes[0 if given is None else given.shape[1] :]
        return Speech(codes, self.decode(codes))

    @torch.no_grad()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Decodes as the processor, which fails for no whole frame. `[rows, codebooks]` -> `[samples]`."""
        has_ended = (codes[-1] == self.model.config.audio_stream_eos_id).all()
        if len(codes) - 1 - int(has_ended) < codes.shape[1]:
            return torch.empty(0)
        wave: torch.Tensor = self.processor.decode(codes[None])
        return wave


def as_conversation(prompt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt in the form of the processor's chat template."""
    given = prompt.get("additional_information") or {}
    conversation = [_message("system", SYSTEM), _message("scene", given.get("instructions", SCENE))]
    if "ref_audio" in given:
        sound = {"type": "audio", "audio": given["ref_audio"][0].numpy()}
        conversation += [_message("user", given["ref_text"]), {"role": "assistant", "content": [sound]}]
    return [*conversation, _message("user", prompt["prompt"])]


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}
