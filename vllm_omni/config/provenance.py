# SPDX-License-Identifier: Apache-2.0
"""Where in a stage configuration file each value stands."""

from collections.abc import Iterator
from pathlib import Path

import yaml

KeyPath = tuple[str | int, ...]
"""Keys from the top to a value. A stage is named by its id: `("stage_args", 0, "runtime", "devices")`."""


def locate_values(path: str | Path) -> dict[KeyPath, int]:
    """The line, from 1, of every value and of every mapping and list of values. The file must be a valid one."""
    root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    return {} if root is None else dict(_walk(root, ()))


def _walk(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if path:
        yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _walk(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            yield from _walk(item, (*path, _stage_id(item) if path == ("stage_args",) else place))


def _stage_id(stage: yaml.MappingNode) -> int:
    return next(int(value.value) for key, value in stage.value if key.value == "stage_id")
