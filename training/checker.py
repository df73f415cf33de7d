# SPDX-License-Identifier: Apache-2.0
"""What a picture of shapes shows, found by its pixels: no model takes part."""

from collections.abc import Iterator

import numpy as np
from PIL import Image

from training.language import COLOURS, KINDS, PLACES, SIZES, Scene, Shape, relation, split_words
from training.pictures import RGB, outline

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
    left = mask.copy()
    for start in map(tuple, np.argwhere(mask)):
        if not left[start]:
            continue
        left[start] = False
        region, border = [start], [start]
        while border:
            y, x = border.pop()
            for point in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if 0 <= point[0] < mask.shape[0] and 0 <= point[1] < mask.shape[1] and left[point]:
                    left[point] = False
                    region.append(point)
                    border.append(point)
        yield np.array(region)


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
    points = np.array(outline(shape, 0.5, 0.5))
    following = np.roll(points, -1, axis=0)
    return abs(float((points[:, 0] * following[:, 1] - following[:, 0] * points[:, 1]).sum())) / 2


def _hull_area(region: np.ndarray) -> float:
    """Pixels of the convex hull: of the pixels' corners."""
    corners = {(int(y) + dy, int(x) + dx) for y, x in region for dy in (0, 1) for dx in (0, 1)}
    points = sorted(corners)
    hull: list[tuple[int, int]] = []
    for way in (points, points[::-1]):
        start = len(hull)
        for point in way:
            while len(hull) > start + 1 and _turn(hull[-2], hull[-1], point) <= 0:
                hull.pop()
            hull.append(point)
        hull.pop()
    corners_array = np.array(hull, float)
    following = np.roll(corners_array, -1, axis=0)
    return abs(float((corners_array[:, 0] * following[:, 1] - following[:, 0] * corners_array[:, 1]).sum())) / 2


def _turn(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> int:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
