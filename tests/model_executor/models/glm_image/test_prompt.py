# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's prompts against HF's processor and positions."""

from typing import Any

import pytest
import torch
from PIL import Image

from vllm_omni.model_executor.prompt_processor import PromptProcessor
from vllm_omni.sampling_params import DiffusionSamplingParams
from vllm_omni.testing.oracles.glm_image import GlmImageReference

from .cases import CASES, ImageCase

HELLO: Any = {"prompt": "hello"}


def inputs_of(reference: GlmImageReference, case: ImageCase) -> Any:
    """As diffusers' pipeline makes them."""
    content: list[Any] = [{"type": "image", "image": image} for image in case.images]
    content.append({"type": "text", "text": case.prompt})
    sizes = {"target_h": case.height, "target_w": case.width}
    return reference.pipe.processor.apply_chat_template(
        [[{"role": "user", "content": content}]], tokenize=True, return_dict=True, return_tensors="pt", **sizes
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ids_pixels_and_positions_are_those_of_hf(
    case: ImageCase, prompt_processor: PromptProcessor, reference: GlmImageReference
) -> None:
    made = prompt_processor(case.omni_prompt, case.settings)  # type: ignore[arg-type]
    information, expected = made.additional_information, inputs_of(reference, case)
    assert made.prompt_token_ids == expected["input_ids"][0].tolist()
    assert torch.equal(information.get("pixel_values", torch.empty(0)), expected.get("pixel_values", torch.empty(0)))

    model = reference.pipe.vision_language_encoder.model
    positions, _ = model.get_rope_index(expected["input_ids"], expected["image_grid_thw"])
    generated = model._cached_decode_position_ids[0, :, :-1]  # The last one is that of an end token.
    assert torch.equal(information["mrope_positions"], torch.cat([positions[:, 0], generated], 1))
    assert made.max_tokens == information["num_tokens"] == generated.shape[1]


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ({"prompt": " "}, {}, "prompt is empty"),
        ({"prompt": 3}, {}, "prompt must be a string, not int"),
        ({}, {}, "the prompt has no 'prompt'"),
        ({"prompt": "a <|image|>"}, {}, r"prompt has <\|image\|>, a special token of this model; remove it"),
        ({"prompt": "a <|dit_token_64|>"}, {}, r"prompt has <\|dit_token_64\|>"),
        ({**HELLO, "prompt_token_ids": [1]}, {}, "reads no 'prompt_token_ids' of a prompt; it reads prompt"),
        ({**HELLO, "additional_information": {"height": 64}}, {}, "reads no 'height' of additional_information"),
        ({**HELLO, "multi_modal_data": {"audio": 1}}, {}, "multi_modal_data has 'audio'"),
        ({**HELLO, "multi_modal_data": {"image": "cat.png"}}, {}, "image 0 is a str; give a PIL image"),
        ({**HELLO, "multi_modal_data": {"image": Image.new("RGB", (600, 100))}}, {}, "aspect ratio"),
        (HELLO, {"height": 100}, "height 100: this model makes multiples of 32; the nearest are 96 and 128"),
        (HELLO, {"width": 20}, "width 20: this model makes multiples of 32; the nearest is 32"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    prompt: Any, settings: dict[str, int], message: str, prompt_processor: PromptProcessor
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        prompt_processor(prompt, DiffusionSamplingParams(**{"height": 64, "width": 64, **settings}))


def test_the_seed_of_the_image_is_that_of_its_tokens(prompt_processor: PromptProcessor) -> None:
    seeds = {None: None, 5: 5}
    for given, expected in seeds.items():
        assert prompt_processor(HELLO, DiffusionSamplingParams(height=64, width=64, seed=given)).seed == expected
    assert prompt_processor(HELLO, DiffusionSamplingParams(height=64, width=64, seed=[7, 8])).seed == 7
