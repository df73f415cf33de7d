# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni-MoE in transformers 5.19, with two repairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from vllm_omni.testing.oracles.base import NoSpeech, OracleParams, OracleResult, Reference

DEFAULT_SPEAKER = "Ethan"


class Qwen3OmniMoeReference(Reference):
    """Repaired at loading; see the two functions below."""

    def __init__(self, path: str | Path, dtype: torch.dtype) -> None:
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(path, dtype=dtype).eval()
        repair_talker_config(model)
        repair_long_waves(model)
        super().__init__(model)

    def generate(self, inputs: dict[str, Any], params: OracleParams) -> torch.Tensor:
        _, audio = self.model.generate(
            **inputs,
            **params.generate_kwargs(),
            return_audio=True,
            speaker=params.speaker or DEFAULT_SPEAKER,
            # The default is the real checkpoint's <|im_end|>, not that of the configuration.
            thinker_eos_token_id=self.model.config.im_end_token_id,
        )
        return audio.reshape(-1)

    def run_talker(self, generate: Callable[..., Any], kwargs: dict[str, Any], result: OracleResult) -> Any:
        output = generate(**kwargs)
        result.talker_token_ids = output.sequences[0].tolist()
        frames = [step[-1] for step in output.hidden_states if step[-1] is not None]  # each [1, code groups]
        if not frames:
            raise NoSpeech
        result.codes = torch.cat(frames).T.contiguous()
        return output


def repair_talker_config(model: Qwen3OmniMoeForConditionalGeneration) -> None:
    """Audio together with an image or a video raises AttributeError in transformers 5.19: the talker's
    `get_rope_index` reads `audio_config`, which only the thinker's configuration has."""
    thinker_config: Any = model.config.thinker_config
    model.talker.config.audio_config = thinker_config.audio_config


def repair_long_waves(model: Qwen3OmniMoeForConditionalGeneration) -> None:
    """More than 300 frames are decoded in pieces of 300 with 25 frames before them as context. Each piece
    ends 555 samples early, which the next one does not add, and the vocoder's attention spans more than 25 frames. Here
    all frames are decoded at once: a continuous wave of `frames * 1920 - 555` samples."""
    vocoder: Any = model.code2wav
    vocoder.chunked_decode = lambda codes, chunk_size=300, left_context_size=25: vocoder(codes)
