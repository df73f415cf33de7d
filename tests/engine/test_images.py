# SPDX-License-Identifier: Apache-2.0
"""Images of prompts for vLLM's engines. Needs no engine."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from vllm.multimodal.media import ImageMediaIO, MediaConnector

from vllm_omni.engine.images import OmniImageIO, fetch_images, show_images

TURNED = Image.Exif()
TURNED[ExifTags.Base.Orientation] = 6


def uri(image: Image.Image, file_format: str = "PNG", **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def fetch(part: Any, **settings: Any) -> Any:
    connector = MediaConnector(media_io_kwargs={"image": settings})
    (message,) = fetch_images([{"role": "user", "content": [part]}], connector)
    return message["content"][0]


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        (Image.new("I;16", (6, 4), 257 * 100), (100, 100, 100)),
        (Image.new("RGBA", (6, 4), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGB", (6, 4), (1, 2, 3)), (1, 2, 3)),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_every_way_shows_the_same_image(image: Image.Image, shown: tuple[int, ...]) -> None:
    url = uri(image, exif=TURNED)
    file = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    ways = [
        fetch({"type": "image_url", "image_url": {"url": url, "detail": "high"}}),
        fetch({"type": "input_image", "image_url": url}),
        fetch({"image_url": url, "uuid": "a"}),
        fetch({"type": "image_pil", "image_pil": file}),
        {"image_pil": show_images({"image": file})["image"]},
        {"image_pil": show_images({"image": [file]})["image"][0]},
    ]
    for part in ways:
        read = part["image_pil"]
        assert (read.mode, read.size, read.getpixel((0, 0))) == ("RGB", (4, 6), shown)
    assert ways[2]["uuid"] == "a" and "image_url" not in ways[2]


def test_the_background_can_be_configured() -> None:
    url = uri(Image.new("RGBA", (6, 4), (255, 0, 0, 0)))
    part = {"type": "image_url", "image_url": {"url": url}}
    assert fetch(part, rgba_background_color=[0, 0, 9])["image_pil"].getpixel((0, 0)) == (0, 0, 9)


@pytest.mark.parametrize(
    "content", ["Hello", None, [{"type": "text", "text": "Hello"}], [{"type": "image_url"}], ["Hello"], [None]]
)
def test_other_content_is_kept(content: Any) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant"}, "odd"]
    assert fetch_images(messages, MediaConnector()) == messages


def test_other_media_are_kept() -> None:
    samples = np.zeros(3)
    assert show_images({"audio": samples}) == {"audio": samples}
    pixels = np.zeros((4, 6, 3), np.uint8)
    assert show_images({"image": [pixels]})["image"][0] is pixels
    assert show_images({"image": np.zeros((4, 6, 4), np.uint8)})["image"].getpixel((0, 0)) == (255, 255, 255)


def test_an_image_without_a_range_is_refused() -> None:
    with pytest.raises(ValueError, match="an image has mode 'F'"):
        show_images({"image": Image.new("F", (6, 4))})
    with pytest.raises(ValueError, match="has mode 'F'"):
        fetch({"type": "image_url", "image_url": {"url": uri(Image.new("F", (6, 4)), "TIFF")}})


def test_a_reader_has_all_that_vllm_s_has_set() -> None:
    theirs = ImageMediaIO("RGBA", rgba_background_color=(1, 2, 3))
    theirs.decoded_budget = object()  # type: ignore[assignment]  # by a request, from vLLM 0.33 on
    ours = OmniImageIO.from_vllm(theirs)
    assert type(ours) is OmniImageIO and vars(ours) == vars(theirs)
