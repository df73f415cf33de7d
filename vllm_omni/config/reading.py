# SPDX-License-Identifier: Apache-2.0
"""Plain values, as YAML and callers give them, as typed structs; and what msgspec complains of, taken apart."""

import re
import threading
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")

# msgspec shows other threads what it is still learning of a type: pipelines may be opened in several at once.
_learning_types = threading.Lock()


def convert(raw: Any, cls: type[_T]) -> _T:
    """
    Raises:
        msgspec.ValidationError: A value has the wrong type, or a key is not known; see `take_apart`.
    """
    with _learning_types:
        return msgspec.convert(raw, cls)


def take_apart(error: msgspec.ValidationError) -> tuple[str, str]:
    """What is wrong, and where: `stage_args[0].runtime`, or nothing where it is the whole."""
    message = str(error)
    where = re.search(r" - at `\$(.*)`", message)
    return message.split(" - at ")[0], where.group(1).lstrip(".") if where else ""
