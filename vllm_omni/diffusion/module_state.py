# SPDX-License-Identifier: Apache-2.0
"""What concurrent calls of a pipeline share in its networks: submodules, and functions such as attention processors.

A pipeline that replaces some of them during its call (perturbed-attention guidance does) changes them for all other
calls. Knows no pipeline by name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_MISSING = object()


class ModuleState:
    """Submodules and functions of networks at one time."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._places = {name: list(_places(module)) for name, module in modules.items()}

    def find_changed(self) -> list[str]:
        """The names of networks in which something is not what it was."""
        return [
            name
            for name, places in self._places.items()
            if any(attributes.get(key, _MISSING) is not value for attributes, key, value in places)
        ]

    def restore(self) -> None:
        for places in self._places.values():
            for attributes, key, value in places:
                if value is not _MISSING:
                    attributes[key] = value
                else:
                    attributes.pop(key, None)


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Dictionaries of attributes, and a key and value of each: an attribute that is a module is in another one."""
    for part in module.modules():
        attributes, children = vars(part), part._modules
        functions = [key for key, value in attributes.items() if callable(value)]
        for key in {*functions, *children, "forward"}:
            yield attributes, key, attributes.get(key, _MISSING)
            yield children, key, children.get(key, _MISSING)
