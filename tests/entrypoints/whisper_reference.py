# SPDX-License-Identifier: Apache-2.0
"""What HF transformers' Whisper writes for a sound, greedily."""

from pathlib import Path

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from vllm.multimodal.audio import split_audio

from vllm_omni.engine.audio_clips import CUT_SHARE, PAUSE_S
from vllm_omni.engine.transcription import without_times
from vllm_omni.entrypoints.openai.audio_formats import to_pcm16
from vllm_omni.testing.media import SAMPLE_RATE, make_audio
from vllm_omni.testing.tiny.whisper import CLIP_S

NUM_TOKENS = 24
"""Of one clip: random weights do not stop by themselves."""


def make_sound(seed: int, seconds: float) -> np.ndarray:
    """float32 `[samples]` of `SAMPLE_RATE`, of 16 bits, so that a file has them as they are: of random weights, two
    tokens may be nearly as likely."""
    return (to_pcm16(make_audio(seed, seconds)) / 32768).astype(np.float32)


def split(sound: np.ndarray) -> list[np.ndarray]:
    """The clips of a sound: whole, or cut at a pause in the last third."""
    if len(sound) <= CLIP_S * SAMPLE_RATE:
        return [sound]
    return split_audio(sound, SAMPLE_RATE, CLIP_S, CLIP_S * CUT_SHARE, int(PAUSE_S * SAMPLE_RATE))


class WhisperReference:
    def __init__(self, checkpoint: Path) -> None:
        self._model = WhisperForConditionalGeneration.from_pretrained(checkpoint)
        self._processor = WhisperProcessor.from_pretrained(checkpoint)

    def write(self, clip: np.ndarray, prompt: str) -> str:
        """The text that follows a prompt, of a sound of at most `CLIP_S`."""
        tokenizer = self._processor.tokenizer
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        written: list[int] = []
        while len(written) < NUM_TOKENS and tokenizer.eos_token_id not in written:
            written.append(int(self._logits(clip, ids).argmax()))
            ids = torch.cat([ids, torch.tensor([written[-1:]])], dim=1)
        return tokenizer.backend_tokenizer.decode(written, skip_special_tokens=True)  # Keeps times.

    def find_language(self, clip: np.ndarray) -> str:
        """The code of the likeliest language."""
        tokenizer = self._processor.tokenizer
        start = tokenizer("<|startoftranscript|>", add_special_tokens=False, return_tensors="pt").input_ids
        ids = {code: tokenizer.convert_tokens_to_ids(f"<|{code}|>") for code in LANGUAGES}
        logits = self._logits(clip, start)
        return max(ids, key=lambda code: logits[ids[code]])

    def transcribe(self, sound: np.ndarray, language: str, task: str = "transcribe", before: str = "") -> str:
        """The text of a sound of any length, without times."""
        prompt = f"{before}<|startoftranscript|><|{language}|><|{task}|><|notimestamps|>"
        return " ".join(without_times(self.write(clip, prompt)).strip() for clip in split(sound))

    @torch.no_grad()
    def _logits(self, clip: np.ndarray, ids: torch.Tensor) -> torch.Tensor:
        """Of the token that follows `ids` `[1, n]`: `[vocabulary]`."""
        extract = self._processor.feature_extractor
        features = extract(clip, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        return self._model(features, decoder_input_ids=ids).logits[0, -1]
