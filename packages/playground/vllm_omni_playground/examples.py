# SPDX-License-Identifier: Apache-2.0
"""Three examples to click for each tab, made from what the model reads and makes."""

import io
from typing import Any

from gradio.processing_utils import save_bytes_to_cache
from PIL import Image, ImageDraw

from vllm_omni_playground.client import Description

_NUM = 3
_QUESTIONS = (
    ("image", "text", "What is in the picture?"),
    ("image", "text", "How many shapes are there?"),
    ("text", "image", "Draw a red circle left of a blue square."),
    ("text", "audio", "Say: a red circle."),
    ("text", "text", "What is the Moon made of?"),
    ("text", "text", "Count from one to ten."),
    ("text", "text", "Tell me a very short story."),
)
"""What is read besides the text, what is made, and the text."""

IMAGES = ("A red circle is left of a blue square.", "A green star.", "A yellow triangle in the middle.")
VIDEOS = ("A hen walks across a yard.", "Waves roll onto a beach.", "A candle burns in the dark.")
SPEECH = ("Hello, how are you today?", "A red circle is left of a blue square.", "The teacher opens the old window.")


def questions(description: Description, cache: str) -> list[Any]:
    """Messages for a chat: Gradio's `ExampleMessage`. `cache` is the folder of Gradio's files."""
    known = [row for row in _QUESTIONS if row[0] in description.inputs and row[1] in description.outputs][:_NUM]
    return [{"text": text, "files": [_picture(cache)] if read == "image" else []} for read, _, text in known]


def _picture(cache: str) -> str:
    """The file of a red circle left of a blue square."""
    image = Image.new("RGB", (192, 192), "white")
    canvas = ImageDraw.Draw(image)
    canvas.ellipse((14, 74, 58, 118), fill=(215, 35, 35))
    canvas.rectangle((138, 74, 182, 118), fill=(40, 80, 215))
    data = io.BytesIO()
    image.save(data, "PNG")
    return save_bytes_to_cache(data.getvalue(), "shapes.png", cache)
