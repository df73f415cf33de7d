# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni in transformers 5.19, with two repairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniForConditionalGeneration

from vllm_omni.testing.oracles.base import NoSpeech, OracleParams, OracleResult, Reference

DEFAULT_SPEAKER = "Chelsie"


class Qwen2_5OmniReference(Reference):
    """Repaired at loading; see the two functions below."""

    def __init__(self, path: str | Path, dtype: torch.dtype) -> None:
        model = Qwen2_5OmniForConditionalGeneration.from_pretrained(path, dtype=dtype).eval()
        repair_talker_inputs(model)
        repair_talker_prefill(model)
        super().__init__(model)
        talker = model.config.talker_config
        self._stop_codes = [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id]

    def generate(self, inputs: dict[str, Any], params: OracleParams) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            # Only the wave's noise is random: thinker and talker are greedy.
            torch.manual_seed(params.wave_seed)
            _, audio = self.model.generate(
                **inputs,
                **params.generate_kwargs(),
                speaker=self._speaker(params.speaker or DEFAULT_SPEAKER),
                thinker_eos_token_id=self.model.config.thinker_config.text_config.eos_token_id,
                # The defaults are those of the real checkpoint, not of the configuration.
                talker_eos_token_id=self._stop_codes,
            )
        return audio

    def run_talker(self, generate: Callable[..., Any], kwargs: dict[str, Any], result: OracleResult) -> Any:
        sequences = generate(**kwargs)
        sampled = sequences[0, kwargs["input_ids"].shape[1] :]
        result.talker_token_ids = sampled.tolist()
        codes = sampled[:-1] if result.talker_token_ids[-1] in self._stop_codes else sampled
        if not len(codes):
            raise NoSpeech
        result.codes = codes[None].clone()
        return sequences

    def _speaker(self, name: str) -> str:
        """The checkpoint's spelling."""
        names = {speaker.lower(): speaker for speaker in self.model.speaker_map}
        return names[name.lower()]


def repair_talker_inputs(model: Qwen2_5OmniForConditionalGeneration) -> None:
    """Repairs the talker of transformers 5.19, which raises ValueError for an image or a video: its pixels are also
    passed to `generate`, which has no such arguments."""
    talker: Any = model.talker
    generate = talker.generate

    def without_pixels(**kwargs: Any) -> Any:
        return generate(**{name: value for name, value in kwargs.items() if not name.startswith("pixel_values")})

    talker.generate = without_pixels


def repair_talker_prefill(model: Qwen2_5OmniForConditionalGeneration) -> None:
    """`generate` of transformers 5.19 drops an attention mask of ones only, and without a mask the talker's `forward`
    omits the two codec embeddings at the end of its prompt, and M-RoPE, which silently changes the codes. This restores
    the mask."""

    def restore_mask(
        _talker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if kwargs.get("attention_mask") is None:
            rows = kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
            cache = kwargs.get("cache", kwargs.get("past_key_values"))  # from transformers 5.24 on, and before
            past = 0 if cache is None else cache.get_seq_length()
            kwargs["attention_mask"] = rows.new_ones(rows.shape[0], past + rows.shape[1], dtype=torch.long)
        return args, kwargs

    model.talker.register_forward_pre_hook(restore_mask, with_kwargs=True)
