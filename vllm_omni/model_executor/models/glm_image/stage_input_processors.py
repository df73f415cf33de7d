# SPDX-License-Identifier: Apache-2.0
"""Turns the tokens of GLM-Image's autoregressive model into arguments of diffusers' `GlmImagePipeline`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from PIL import Image

from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.media import to_pil
from vllm_omni.model_executor.models.glm_image.prompt import TOKEN_PIXELS, Grid
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput

DIT_PIXELS = 16
"""Pixels of one position of the DiT, on each side: it reads each token four times."""


class PriorToDiffusion(StageInputProcessor):
    """Gives the pipeline its prior tokens, and those of the input images, so that it runs without the model that makes
    them."""

    reads: ClassVar[tuple[str, ...]] = ("completions", "tensors.image_ids")

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput:
        (prior,) = sources.values()
        assert prior.first_completion is not None and request.diffusion is not None
        token_ids, options = prior.first_completion.token_ids, request.options
        if len(token_ids) < options["num_tokens"]:
            raise ValueError(
                f"the first stage made {len(token_ids)} of {options['num_tokens']} image tokens; raise its max_tokens"
            )
        height, width = options["target"]
        arguments: dict[str, Any] = {
            "prior_token_ids": _upsample(torch.tensor(token_ids[-height * width :]), (height, width))[None]
        }
        if options["sources"]:
            arguments |= _image_arguments(prior.tensors["image_ids"], options["sources"], request.diffusion.images)
        return StageInput(prompt=request.prompt, additional_information=arguments)


def _image_arguments(image_ids: torch.Tensor, grids: Sequence[Grid], images: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Lists have one entry, for the only prompt."""
    parts = image_ids.split([height * width for height, width in grids])
    return {
        "prior_token_image_ids": [torch.cat([_upsample(*each) for each in zip(parts, grids, strict=True)])],
        "source_image_grid_thw": [torch.tensor([(1, 2 * height, 2 * width) for height, width in grids])],
        "image": [_fit(to_pil(image), grid) for image, grid in zip(images, grids, strict=True)],
    }


def _upsample(token_ids: torch.Tensor, grid: Grid) -> torch.Tensor:
    """`[height * width]` -> `[4 * height * width]`."""
    return token_ids.view(*grid).repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()


def _fit(image: Image.Image, grid: Grid) -> Image.Image:
    """The image with as many positions of the DiT as its tokens have: the pipeline fails with any other size."""
    height, width = grid
    if (image.height // DIT_PIXELS, image.width // DIT_PIXELS) != (2 * height, 2 * width):
        image = image.resize((TOKEN_PIXELS * width, TOKEN_PIXELS * height), Image.Resampling.LANCZOS)
    return image.convert("RGB")
