# SPDX-License-Identifier: Apache-2.0
"""Janus-Pro in transformers 5.19, text to image, greedily.

Its processor gets a list of one text: of a string it takes each letter for a text.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import JanusForConditionalGeneration, JanusProcessor

from vllm_omni.testing.hf_oracle import torch_threads


class JanusReference:
    """Images of one prompt after the other."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self.processor: Any = JanusProcessor.from_pretrained(path)
        self.model: Any = JanusForConditionalGeneration.from_pretrained(path, dtype=dtype).eval()

    def prompt_token_ids(self, prompt: str) -> torch.Tensor:
        """int64 `[1, tokens]`, as the published example makes them."""
        messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        return self.processor(text=[text], generation_mode="image", return_tensors="pt")["input_ids"]

    @torch.no_grad()
    def image_tokens(self, prompt: str, guidance_scale: float | None = None) -> torch.Tensor:
        """int64 `[tokens]`; with the scale of the checkpoint by default."""
        token_ids = self.prompt_token_ids(prompt)
        given = {} if guidance_scale is None else {"guidance_scale": guidance_scale}
        with torch_threads(1):
            return self.model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                generation_mode="image",
                do_sample=False,
                **given,
            )[0]

    @torch.no_grad()
    def paint(self, image_tokens: torch.Tensor) -> torch.Tensor:
        """`[tokens]` -> float32 `[height, width, 3]` in [0, 1], before the processor rounds it to bytes."""
        pixels = self.model.decode_image_tokens(image_tokens[None])[0]
        return (pixels.float() / 2 + 0.5).clamp(0, 1)
