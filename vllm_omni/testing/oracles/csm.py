# SPDX-License-Identifier: Apache-2.0
"""CSM in transformers 5.19, for prompts as this package takes them."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CsmForConditionalGeneration, CsmProcessor
from transformers.utils import logging


@dataclass(frozen=True)
class Speech:
    """
    Attributes:
        codes: int64 `[frames, codebooks]`, with the last frame, of zeros, if the speech has ended.
        audio: float32 `[samples]` at 24 kHz; empty for no frame but the last.
    """

    codes: torch.Tensor
    audio: torch.Tensor


class CsmReference:
    """Greedy speech of one prompt after the other."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self.processor = CsmProcessor.from_pretrained(path)
        self.model: Any = CsmForConditionalGeneration.from_pretrained(path, dtype=dtype).eval()

    @torch.no_grad()
    def speak(self, prompt: Mapping[str, Any], max_frames: int) -> Speech:
        """
        Args:
            prompt: `prompt`, and `speaker`, `context`, `ref_audio`, `ref_text` in `additional_information`; sounds at
                24 kHz, mono.
        """
        with _quiet():
            conversation = as_conversation(prompt)
            inputs: Any = self.processor.apply_chat_template(conversation, tokenize=True, return_dict=True)
            codes = self.model.generate(
                **inputs, max_new_tokens=max_frames, do_sample=False, depth_decoder_do_sample=False
            )[0]
        return Speech(codes, self.decode(codes))

    @torch.no_grad()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Decodes as the model's `generate`, which fails for no frames. `[frames, codebooks]` -> `[samples]`."""
        ends = (codes == self.model.config.codebook_eos_token_id).all(-1).nonzero()
        if len(ends):
            codes = codes[: int(ends.min())]
        if not len(codes):
            return torch.empty(0)
        return self.model.codec_model.decode(codes.T[None]).audio_values[0, 0]


def as_conversation(prompt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt in the form of the processor's chat template."""
    given = prompt.get("additional_information") or {}
    speaker = given.get("speaker", "0")
    turns = list(given.get("context", []))
    if "ref_audio" in given:
        turns.insert(0, {"text": given["ref_text"], "audio": given["ref_audio"]})
    conversation = [_message(str(turn.get("speaker", speaker)), turn["text"], turn["audio"]) for turn in turns]
    return [*conversation, _message(speaker, prompt["prompt"])]


def _message(role: str, text: str, audio: tuple[torch.Tensor, int] | None = None) -> dict[str, Any]:
    sounds = [] if audio is None else [{"type": "audio", "audio": audio[0].numpy()}]
    return {"role": role, "content": [{"type": "text", "text": text}, *sounds]}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns of token ids that are larger than the vocabulary of codes, and of ignored stop criteria."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)
