# SPDX-License-Identifier: Apache-2.0
"""Prompts of every kind, and what the reference makes of them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from tests.diffusion.tiny_calls import make_image
from vllm_omni.sampling_params import DiffusionSamplingParams
from vllm_omni.testing.oracles.glm_image import GlmImageReference

SIZE = 64
_WIDE, _SQUARE, _TALL = make_image(0, 96, 64), make_image(1, 64, 64), make_image(2, 64, 128)


@dataclass(frozen=True)
class ImageCase:
    """A request for one image, of `height` x `width` pixels."""

    prompt: str
    height: int = SIZE
    width: int = SIZE
    images: list[Image.Image] = field(default_factory=list)

    @property
    def omni_prompt(self) -> dict[str, Any]:
        media = {"multi_modal_data": {"image": self.images}} if self.images else {}
        return {"prompt": self.prompt, **media}

    @property
    def settings(self) -> DiffusionSamplingParams:
        return DiffusionSamplingParams(height=self.height, width=self.width)

    def prior_tokens(self, reference: GlmImageReference) -> tuple[torch.Tensor, torch.Tensor | None]:
        return reference.prior_tokens(self.prompt, self.height, self.width, self.images)


CASES = {
    "text": ImageCase("a red cat by the sea"),
    "wide": ImageCase("two ships at night", width=128),
    "glyphs": ImageCase('a sign that says "open"', height=96),
    "one image": ImageCase("a blue dog", images=[_WIDE]),
    "several images": ImageCase("the house of the first in the light of the others", 96, 64, [_SQUARE, _TALL, _WIDE]),
}
