# SPDX-License-Identifier: Apache-2.0
"""Command-line flags from config dataclasses, as vLLM makes its own; flags whose value is JSON."""

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm.config.utils import get_attr_docs
from vllm.engine.arg_utils import get_kwargs

from vllm_omni.config.utils import parse_bytes


def add_cli_args(
    group: argparse._ActionsContainer,
    cls: type[Any],
    *,
    exclude: Collection[str] = (),
    types: Mapping[str, Callable[[str], Any]] | None = None,
) -> None:
    """Adds a flag for each field of a dataclass; its help text is the docstring below the field.

    Args:
        exclude: Names of fields without a flag.
        types: Parsers by field name, instead of those for the fields' types; e.g. parsers that check a range.
    """
    docs = get_attr_docs(cls)  # `get_kwargs` has them only if the process was started with --help.
    for name, kwargs in get_kwargs(cls).items():
        if name not in exclude:
            kwargs["help"] = " ".join(docs.get(name, "").split()).replace("%", "%%")
            if name.endswith("_bytes"):
                kwargs["type"] = byte_size
            kwargs |= {"type": types[name]} if types and name in types else {}
            group.add_argument("--" + name.replace("_", "-"), **kwargs)


def byte_size(text: str) -> int:
    """`parse_bytes` for a flag.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_json_object(text: str, value_type: type, form: str) -> dict[str, Any]:
    """A JSON object whose values have one type; `form` shows it in the message.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(item, value_type) for item in value.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise ValueError(f"the key {repeated!r} is given twice; remove one of them")
    return dict(pairs)
