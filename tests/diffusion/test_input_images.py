# SPDX-License-Identifier: Apache-2.0
"""Images of prompts, in all forms that callers have them in."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vllm_omni.diffusion.input_images import read_images

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
TRANSPARENT = np.random.default_rng(1).integers(0, 256, (5, 6, 4), dtype=np.uint8)
GRAY = PIXELS[..., 0]


def read(*images: Any, **options: Any) -> list[torch.Tensor]:
    return read_images({"image": list(images)}, max_pixels=100, **options)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.fromarray(PIXELS), PIXELS),
        (PIXELS, PIXELS),
        (PIXELS[:, ::-1], PIXELS[:, ::-1]),  # a view that runs backwards
        (PIXELS / 255, PIXELS),
        ((PIXELS / 255).astype(np.float16), PIXELS),
        (torch.from_numpy(PIXELS), PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1), PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1) / 255, PIXELS),
        (Image.fromarray(GRAY), np.stack([GRAY] * 3, axis=-1)),
        (GRAY, np.stack([GRAY] * 3, axis=-1)),
        (torch.from_numpy(GRAY)[None], np.stack([GRAY] * 3, axis=-1)),
    ],
)
def test_any_form_becomes_pixels(image: Any, expected: np.ndarray) -> None:
    (pixels,) = read(image)

    assert pixels.dtype == torch.uint8 and pixels.is_contiguous()
    np.testing.assert_array_equal(pixels.numpy(), expected)


def test_transparent_images_are_on_white_unless_the_pipeline_takes_alpha() -> None:
    colours, alpha = TRANSPARENT[..., :3].astype(float), TRANSPARENT[..., 3:] / 255
    for image in (Image.fromarray(TRANSPARENT), TRANSPARENT, torch.from_numpy(TRANSPARENT).permute(2, 0, 1)):
        (pixels,) = read(image, keep_alpha=True)
        np.testing.assert_array_equal(pixels.numpy(), TRANSPARENT)
        (pixels,) = read(image)
        assert pixels.is_contiguous()
        np.testing.assert_allclose(pixels.numpy(), colours * alpha + 255 * (1 - alpha), atol=1)


def test_read_images_are_copies() -> None:
    image = PIXELS.copy()
    (pixels,) = read(image)
    image[:] = 0

    np.testing.assert_array_equal(pixels.numpy(), PIXELS)


@pytest.mark.parametrize(("data", "count"), [(None, 0), ({}, 0), ({"image": []}, 0), ({"image": PIXELS}, 1)])
def test_one_image_needs_no_list(data: dict[str, Any] | None, count: int) -> None:
    assert len(read_images(data, max_pixels=100)) == count


def truncated_png() -> Image.Image:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "png")
    return Image.open(io.BytesIO(file.getvalue()[:-30]))


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((101, 1, 3), np.uint8), ["image 1", "101 x 1", "101 pixels", "at most 100", "max_pixels"]),
        (Image.new("RGB", (1, 101)), ["101 x 1", "at most 100"]),
        (np.zeros((0, 5, 3), np.uint8), ["is empty"]),
        (np.zeros((2, 4, 6, 3), np.uint8), ["shape [2, 4, 6, 3]", "as a list"]),
        (np.zeros((4, 6, 2), np.uint8), ["shape [4, 6, 2]", "1, 3 or 4 channels"]),
        (np.zeros(5, np.uint8), ["shape [5]"]),
        (PIXELS.astype(np.float32), ["outside [0, 1]"]),
        (np.full((4, 6, 3), np.nan), ["outside [0, 1]"]),
        (PIXELS.astype(np.int64), ["torch.int64", "give uint8"]),
        (np.array([["a"]]), ["image 1"]),
        (Image.new("I", (4, 4)), ["image 1 has mode 'I'", "convert it to RGB"]),
        (Image.new("F", (4, 4)), ["mode 'F'"]),
        (torch.ones(5, 6, 3).to_sparse(), ["give a dense one"]),
        (torch.ones(5, 6, 3, device="meta"), ["give a dense one"]),
        (truncated_png(), ["image 1 cannot be decoded"]),
        ("cat.png", ["a str", "PIL.Image.open"]),
        (b"\x89PNG", ["a bytes", "PIL.Image.open"]),
        (7, ["a int"]),
    ],
)
def test_invalid_images_are_refused(image: Any, words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        read(PIXELS, image)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("data", "words"),
    [([PIXELS], "must be a dict"), ({"audio": PIXELS}, "takes images only"), ({"image": None, "video": 1}, "'video'")],
)
def test_other_media_are_refused(data: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        read_images(data, max_pixels=100)
