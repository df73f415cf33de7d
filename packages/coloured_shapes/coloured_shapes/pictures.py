# SPDX-License-Identifier: Apache-2.0
"""Draws scenes: antialiased shapes on a grid of three by three, on plain and noisy backgrounds."""

import math
import random

import numpy as np
from PIL import Image, ImageDraw

from coloured_shapes.language import Scene, Shape

SIDE = 96
RGB = {
    "red": (215, 35, 35), "green": (40, 160, 60), "blue": (40, 80, 215),
    "yellow": (240, 215, 40), "purple": (140, 50, 165), "orange": (245, 140, 25),
}  # fmt: skip
RADIUS = {"small": 0.075, "large": 0.135}
"""Of a shape's circumcircle, in sides of the picture."""
_SCALE = 4  # drawn larger, and reduced


def draw(rng: random.Random, scene: Scene, side: int = SIDE, noise: float = 0.0, shift: float = 0.02) -> Image.Image:
    """
    Args:
        noise: Standard deviation of each channel, in 0 to 255.
        shift: Largest random offset of a shape, in sides of the picture.
    """
    size = side * _SCALE
    picture = Image.new("RGB", (size, size), _background(rng))
    canvas = ImageDraw.Draw(picture)
    for shape in scene.shapes:
        x, y = ((2 * i + 1) / 6 + rng.uniform(-shift, shift) for i in (shape.column, shape.row))
        color = tuple(min(255, max(0, channel + rng.randint(-12, 12))) for channel in RGB[shape.colour])
        canvas.polygon([(size * px, size * py) for px, py in outline(shape, x, y)], fill=color)
    picture = picture.resize((side, side), Image.Resampling.BOX)
    if not noise:
        return picture
    pixels = np.asarray(picture, np.float32)
    noisy = pixels + np.random.default_rng(rng.randrange(1 << 30)).normal(0, noise, pixels.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def outline(shape: Shape, x: float, y: float) -> list[tuple[float, float]]:
    """Corners around the center `x`, `y`."""
    radius = RADIUS[shape.size]
    if shape.kind == "circle":
        angles, radii = [i / 60 for i in range(60)], [0.95]
    elif shape.kind == "square":
        angles, radii = [(2 * i + 1) / 8 for i in range(4)], [1.2]
    elif shape.kind == "triangle":
        angles, radii = [i / 3 - 0.25 for i in range(3)], [1.15]
    else:
        angles, radii = [i / 10 - 0.25 for i in range(10)], [1.2, 0.5]
    points = []
    for i, angle in enumerate(angles):
        r = radius * radii[i % len(radii)]
        points.append((x + r * math.cos(2 * math.pi * angle), y + r * math.sin(2 * math.pi * angle)))
    return points


def _background(rng: random.Random) -> tuple[int, int, int]:
    """White, grey, or pale."""
    grey = rng.choice((255, 255, rng.randint(190, 255), rng.randint(0, 60)))
    return tuple(min(255, max(0, grey + rng.randint(-8, 8))) for _ in range(3))  # type: ignore[return-value]
