# SPDX-License-Identifier: Apache-2.0
"""GLM-Image in diffusers 0.42.1 and transformers 5.19, with greedy prior tokens.

Two changes, both through the model's own settings and methods:

- Its generation samples from the likeliest token only, which is never one that is no code: those cannot be embedded by
  the DiT.
- diffusers expects an image's features as rows; transformers returns them as `[channels, height, width]`, with which
  image to image fails.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vllm_omni.testing.diffusers_oracle import DiffusersOracle
from vllm_omni.testing.hf_oracle import torch_threads


class GlmImageReference(DiffusersOracle):
    """`DiffusersOracle.generate`, and the prior tokens."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(path, dtype)
        model: Any = self.pipe.vision_language_encoder
        config = model.config
        specials = range(config.vq_config.num_embeddings, config.text_config.vision_vocab_size)
        model.generation_config.update(top_k=1, suppress_tokens=list(specials))
        _pass_features_as_rows(model)

    def prior_tokens(
        self, prompt: str, height: int, width: int, images: Sequence[Image.Image] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 `[tokens]` of the image, one for 16 x 16 pixels, and those of the input images, one after the other."""
        with torch.no_grad(), torch_threads(self.num_threads):
            made, given, _ = self.pipe.generate_prior_tokens(
                prompt, height, width, image=[list(images)] if images else None
            )
        return made[0], None if given is None else given[0]

    def generate(
        self, prompt: str, *, seed: int, images: Sequence[Image.Image] | None = None, **call_arguments: Any
    ) -> torch.Tensor:
        given = {"image": list(images)} if images else {}  # A list, also of one image.
        return super().generate(prompt, seed=seed, **given, **call_arguments)


def _pass_features_as_rows(model: Any) -> None:
    """Passes features as rows in diffusers' calls, which are those without `images_per_sample`."""
    get_features, get_tokens = model.get_image_features, model.get_image_tokens

    def features(pixel_values: torch.Tensor, grids: torch.Tensor) -> Any:
        output = get_features(pixel_values, grids)
        output.pooler_output = [image.flatten(1).T for image in output.pooler_output]
        return output

    def tokens(rows: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        images = rows.split(grids.prod(1).tolist())
        sizes = grids[:, 1:].tolist()
        return get_tokens([image.T.unflatten(1, size) for image, size in zip(images, sizes, strict=True)], grids)

    def choose(method: Any, repaired: Any) -> Any:
        return lambda *args, **kwargs: method(**kwargs) if kwargs else repaired(*args)

    model.get_image_features = choose(get_features, features)
    model.get_image_tokens = choose(get_tokens, tokens)
