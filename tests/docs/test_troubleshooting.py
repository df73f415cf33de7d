# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md quotes messages that exist."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT

HOLE = "..."
MESSAGES = re.findall(r"^`(.+)`\n:   ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


def messages() -> Iterator[str]:
    """The strings of the package, with a hole for each value that is formatted."""
    for path in (ROOT / "vllm_omni").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.fixture(scope="module")
def in_the_code() -> str:
    return "\n".join(messages())


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 25 and len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_code(message: str, in_the_code: str) -> None:
    assert message in in_the_code
