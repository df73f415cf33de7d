# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's prompt: a text and input images, and the grids of the tokens that are to be made.

Of a text alone the model first makes a small image, of about 256 tokens, and then the image itself. With input images
it makes the image at once. Reference: `GlmImagePipeline.generate_prior_tokens` of diffusers, whose prompt is the text
of the checkpoint's `GlmImageProcessor`; positions: `GlmImageModel.get_rope_index` of HF transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers import GlmImageProcessor, PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.diffusion.input_images import read_images
from vllm_omni.inputs import StageInput
from vllm_omni.media import to_pil
from vllm_omni.model_executor.prompt_processor import PromptProcessor, read_text

TOKEN_PIXELS = 32
"""Pixels of one token, on each side."""
MAX_PIXELS = 4096 * 4096
"""Of one input image, which the processor makes smaller."""

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


class GlmImagePromptProcessor(PromptProcessor):
    """Makes prompts with this information: `mrope_positions`, int64 `[3, tokens]`, of the prompt and of all tokens that
    are made; `num_tokens`, how many these are, the last of them those of the grid `target`; `sources`, the grids of
    the input images. With images also `pixel_values` and `image_grid_thw`, as the processor returns them.
    """

    fields: ClassVar[tuple[str, ...]] = ("prompt", "multi_modal_data")
    settings: ClassVar[tuple[str, ...]] = ("height", "width", "seed")

    def __init__(self, hf_config: PretrainedConfig, tokenizer: TokenizerLike) -> None:
        super().__init__(hf_config, tokenizer)
        hf_tokenizer: Any = tokenizer
        self._processor: Any = GlmImageProcessor.from_pretrained(hf_tokenizer.name_or_path)
        self._specials = (self._processor.image_token, hf_tokenizer.bos_token, hf_tokenizer.eos_token)

    def process(self, given: Mapping[str, Any]) -> StageInput:
        text = read_text(given["prompt"], "prompt", self._specials)
        height, width = (_read_side(given, name) for name in ("height", "width"))
        images = [to_pil(image) for image in read_images(given.get("multi_modal_data"), MAX_PIXELS)]
        inputs = self._tokenize(text, images, height, width)
        token_ids = inputs["input_ids"][0].tolist()
        grids: list[Grid] = [(h, w) for _, h, w in inputs["image_grid_thw"].tolist()]
        sources, targets = grids[: len(images)], grids[len(images) :]
        num_tokens = sum(h * w for h, w in targets)
        information = {
            "mrope_positions": positions_of([*self._runs(token_ids, sources), *reversed(targets)]),
            "num_tokens": num_tokens,
            "target": targets[0],
            "sources": sources,
        }
        if images:
            information["pixel_values"] = inputs["pixel_values"]
            information["image_grid_thw"] = inputs["image_grid_thw"][: len(images)]
        seed = given.get("seed")
        return StageInput(
            prompt_token_ids=token_ids,
            additional_information=information,
            max_tokens=num_tokens,
            seed=seed[0] if isinstance(seed, list) else seed,
        )

    def _tokenize(self, text: str, images: Sequence[Image.Image], height: int, width: int) -> Any:
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
        return self._processor.apply_chat_template(
            [[{"role": "user", "content": content}]],
            tokenize=True,
            return_dict=True,
            processor_kwargs={"target_h": height, "target_w": width, "return_tensors": "pt"},
        )

    def _runs(self, token_ids: list[int], sources: Sequence[Grid]) -> list[int | Grid]:
        """The prompt as numbers of text tokens and grids of images."""
        runs: list[int | Grid] = []
        at = 0
        for height, width in sources:
            start = token_ids.index(self.hf_config.image_token_id, at)
            runs += [start - at, (height, width)]
            at = start + height * width
        return [*runs, len(token_ids) - at]


def positions_of(runs: Sequence[int | Grid]) -> torch.Tensor:
    """M-RoPE positions, int64 `[3, tokens]`.

    Args:
        runs: Numbers of text tokens, which have one position each, and grids: all tokens of a grid have its time, and a
            row and a column. What follows a grid starts after its longer side.
    """
    start, pieces = 0, []
    for run in runs:
        sides = (run,) if isinstance(run, int) else (1, *run)
        pieces.append(start + torch.cartesian_prod(*map(torch.arange, sides)).reshape(-1, len(sides)).T.expand(3, -1))
        start += max(sides)
    return torch.cat(pieces, 1)


def _read_side(given: Mapping[str, Any], name: str) -> int:
    side: int = given[name]
    if side % TOKEN_PIXELS:
        below = side // TOKEN_PIXELS * TOKEN_PIXELS
        nearest = f"are {below} and {below + TOKEN_PIXELS}" if below else f"is {TOKEN_PIXELS}"
        raise ValueError(f"{name} {side}: this model makes multiples of {TOKEN_PIXELS}; the nearest {nearest}")
    return side
