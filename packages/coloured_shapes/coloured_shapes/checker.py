# SPDX-License-Identifier: Apache-2.0
"""What a picture of shapes shows, found by its pixels: no model takes part."""

from collections.abc import Iterator

import cv2
import numpy as np
from PIL import Image

from coloured_shapes.language import COLOURS, KINDS, PLACES, SIZES, Scene, Shape, relation, split_words
from coloured_shapes.pictures import RGB, outline

_MIN_AREA = 0.003
"""Smaller regions are noise; a small triangle has 0.0096 of the picture."""
_CONTRAST = 60.0
_SCALE = 4  # drawn larger, and reduced


def find_shapes(picture: Image.Image) -> Scene:
    """The shapes in reading order."""
    pixels = np.asarray(picture.convert("RGB"), np.float32)
    height, width, _ = pixels.shape
    edge = np.concatenate([pixels[:2].reshape(-1, 3), pixels[:, :2].reshape(-1, 3), pixels[:, -2:].reshape(-1, 3)])
    background = np.median(edge, axis=0)
    is_shape = np.abs(pixels - background).max(-1) > _CONTRAST
    shapes = []
    for region in _regions(is_shape):
        if region.sum() >= _MIN_AREA * height * width:
            shapes.append(_classify(region, pixels, background))
    return Scene(tuple(sorted(shapes, key=lambda shape: shape.place)))


def agrees(scene: Scene, prompt: str) -> bool:
    """Whether a scene shows what the prompt says, and nothing else."""
    words = split_words(prompt)
    wanted: list[dict[str, str]] = []
    size = colour = None
    for word in words:
        if word in SIZES:
            size = word
        elif word in COLOURS:
            colour = word
        elif word in KINDS:
            wanted.append({"kind": word, "colour": colour or ""} | ({"size": size} if size else {}))
            size = colour = None
    if len(wanted) != len(scene.shapes):
        return False
    how = next(
        (name for name in ("left of", "right of", "above", "below") if f" {name} a" in f" {' '.join(words)}"), None
    )
    place = next((place for place in sorted(PLACES, key=len, reverse=True) if " ".join(words).endswith(place)), None)
    return any(
        all(shape in scene.find(**properties) for shape, properties in zip(order, wanted, strict=True))
        and (how is None or relation(*order) == how or _is_also(how, *order))
        and (place is None or PLACES[order[0].place] == place)
        for order in _orders(scene.shapes)
    )


def _is_also(how: str, first: Shape, second: Shape) -> bool:
    """Diagonal neighbours are beside and above each other."""
    return (how == "above" and first.row < second.row) or (how == "below" and first.row > second.row)


def _orders(shapes: tuple[Shape, ...]) -> Iterator[tuple[Shape, ...]]:
    if len(shapes) < 2:
        yield shapes
        return
    for index, shape in enumerate(shapes):
        for rest in _orders(shapes[:index] + shapes[index + 1 :]):
            yield (shape, *rest)


def _regions(mask: np.ndarray) -> Iterator[np.ndarray]:
    """A mask of each region of connected pixels, bool `[height, width]`."""
    num, labels = cv2.connectedComponents(mask.astype(np.uint8), connectivity=4)
    for label in range(1, num):
        yield labels == label


def _classify(region: np.ndarray, pixels: np.ndarray, background: np.ndarray) -> Shape:
    height, width, _ = pixels.shape
    color = np.median(pixels[region], axis=0)
    colour = min(RGB, key=lambda name: float(np.linalg.norm(color - np.array(RGB[name]))))
    # How much of each pixel the shape covers; pixels at its edge have less contrast.
    with_edge = cv2.dilate(region.astype(np.uint8), np.ones((5, 5)))
    coverage = with_edge * ((pixels - background) @ (color - background) / np.sum((color - background) ** 2)).clip(0, 1)
    y, x = (np.argwhere(coverage >= 0) * coverage.reshape(-1, 1)).sum(0) / coverage.sum() + 0.5
    place = min(2, int(3 * y / height)) * 3 + min(2, int(3 * x / width))
    candidates = [Shape(kind, colour, size, place) for kind in KINDS for size in SIZES]
    return max(candidates, key=lambda shape: _overlap(coverage, _draw(shape, x / width, y / height, coverage.shape)))


def _overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Intersection over union."""
    return float(np.minimum(first, second).sum() / np.maximum(first, second).sum())


def _draw(shape: Shape, x: float, y: float, size: tuple[int, ...]) -> np.ndarray:
    """How much of each pixel the shape covers at a place, float32 `[height, width]`."""
    height, width = size
    corners = np.array(outline(shape, x, y)) * (width, height) * _SCALE
    canvas = cv2.fillPoly(
        np.zeros((height * _SCALE, width * _SCALE), np.float32), [corners.round().astype(np.int32)], 1.0
    )
    return cv2.resize(canvas, (width, height), interpolation=cv2.INTER_AREA)
