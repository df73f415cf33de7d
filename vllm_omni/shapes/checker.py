# SPDX-License-Identifier: Apache-2.0
"""What a picture of shapes shows, found by its pixels: no model takes part."""

from collections.abc import Iterator

import cv2
import numpy as np
from PIL import Image

from vllm_omni.shapes.language import COLOURS, KINDS, PLACES, SIZES, Scene, Shape, relation, split_words
from vllm_omni.shapes.pictures import RGB, outline

_MIN_AREA = 0.003
"""Smaller regions are noise; a small triangle has 0.0096 of the picture."""
_CONTRAST = 60.0


def find_shapes(picture: Image.Image) -> Scene:
    """The shapes in reading order."""
    pixels = np.asarray(picture.convert("RGB"), np.float32)
    height, width, _ = pixels.shape
    edge = np.concatenate([pixels[:2].reshape(-1, 3), pixels[:, :2].reshape(-1, 3), pixels[:, -2:].reshape(-1, 3)])
    is_shape = np.abs(pixels - np.median(edge, axis=0)).max(-1) > _CONTRAST
    shapes = []
    for region in _regions(is_shape):
        if len(region) >= _MIN_AREA * height * width:
            shapes.append(_classify(region, pixels))
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
    """Connected pixels, int `[pixels, 2]` of rows and columns."""
    num, labels = cv2.connectedComponents(mask.astype(np.uint8), connectivity=4)
    for label in range(1, num):
        yield np.argwhere(labels == label)


def _classify(region: np.ndarray, pixels: np.ndarray) -> Shape:
    height, width, _ = pixels.shape
    color = np.median(pixels[region[:, 0], region[:, 1]], axis=0)
    colour = min(RGB, key=lambda name: float(np.linalg.norm(color - np.array(RGB[name]))))
    y, x = region.mean(0) / (height, width)
    place = min(2, int(y * 3)) * 3 + min(2, int(x * 3))
    box = np.ptp(region, axis=0) + 1
    filled = len(region) / box.prod()
    solid = len(region) / _hull_area(region)
    if solid < 0.78:
        kind = "star"
    elif filled < 0.64:
        kind = "triangle"
    else:
        kind = "circle" if filled < 0.87 else "square"
    areas = {size: _area(Shape(kind, colour, size, place)) for size in SIZES}
    threshold = (areas["small"] * areas["large"]) ** 0.5 * height * width
    return Shape(kind, colour, "small" if len(region) < threshold else "large", place)


def _area(shape: Shape) -> float:
    """Of its outline, in areas of the picture."""
    return cv2.contourArea(np.array(outline(shape, 0.5, 0.5), np.float32))


def _hull_area(region: np.ndarray) -> float:
    """Pixels of the convex hull: of the pixels' corners."""
    corners = np.concatenate([region + offset for offset in ((0, 0), (0, 1), (1, 0), (1, 1))])
    return cv2.contourArea(cv2.convexHull(corners.astype(np.int32)))
