# SPDX-License-Identifier: Apache-2.0
"""Janus-Pro's prompt: a text, and how closely the image follows it.

Reference: `JanusForConditionalGeneration.generate` of HF transformers with `generation_mode="image"`, and the chat of
the checkpoint's `JanusProcessor`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import GenerationConfig, JanusProcessor, PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.inputs import StageInput
from vllm_omni.model_executor.prompt_processor import PromptProcessor, read_guidance_scale, read_text
from vllm_omni.payloads import Guidance

DEFAULT_SCALE = 5.0
"""The reference's, where the checkpoint has none."""


class JanusPromptProcessor(PromptProcessor):
    """Reads `guidance_scale` (default: the checkpoint's; 1: none) and `seed`; a size can only be the model's."""

    fields: ClassVar[tuple[str, ...]] = ("prompt", "guidance_scale", "seed", "height", "width")

    def __init__(self, hf_config: PretrainedConfig, tokenizer: TokenizerLike) -> None:
        super().__init__(hf_config, tokenizer)
        hf_tokenizer: Any = tokenizer
        path = hf_tokenizer.name_or_path
        self._processor: Any = JanusProcessor.from_pretrained(path)
        self._specials = (self._processor.image_token, hf_tokenizer.boi_token, hf_tokenizer.eoi_token)
        generation: Any = GenerationConfig.from_pretrained(path)
        self._default_scale = float(generation.guidance_scale or DEFAULT_SCALE)
        self._kept = (generation.bos_token_id, generation.generation_kwargs["boi_token_id"])
        self._pad = generation.pad_token_id

    def process(self, given: Mapping[str, Any]) -> StageInput:
        text = read_text(given["prompt"], "prompt", self._specials)
        for name in ("height", "width"):
            self._check_side(name, given.get(name))
        token_ids = self._tokenize(text)
        scale = read_guidance_scale(given.get("guidance_scale", self._default_scale))
        unconditional = [token if token in self._kept else self._pad for token in token_ids]
        return StageInput(
            prompt_token_ids=token_ids,
            guidance=None if scale == 1 else Guidance(unconditional, scale),
            max_tokens=self.hf_config.vision_config.num_image_tokens,
            seed=_read_seed(given.get("seed")),
        )

    def _tokenize(self, text: str) -> list[int]:
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        chat = self._processor.apply_chat_template(messages, add_generation_prompt=True)
        return self._processor(text=[chat], generation_mode="image", return_tensors="pt")["input_ids"][0].tolist()

    def _check_side(self, name: str, side: Any) -> None:
        size = self.hf_config.vision_config.image_size
        if side not in (None, size):
            raise ValueError(f"{name} {side}: this model makes images of {size} x {size} pixels only")


def _read_seed(seed: Any) -> int | None:
    if isinstance(seed, list) and len(seed) == 1:
        (seed,) = seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed must be a whole number of at least 0, not {seed!r}")
    return seed
