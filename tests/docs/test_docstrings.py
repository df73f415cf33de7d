# SPDX-License-Identifier: Apache-2.0
"""The first line of a docstring stands alone: it does not depend on the name below or the docstring above it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

FRAGMENT = re.compile(
    r"(?:After|Also|As|At|Before|Beside|Between|By|For|From|In|Of|On|Such|That|The same|To|Under|Which|With|Without)\b"
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, _DOCUMENTED) and FRAGMENT.match(text := ast.get_docstring(node) or ""):
            yield f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {text.splitlines()[0]}"


def test_docstrings_stand_alone() -> None:
    found = [
        line
        for top in ("vllm_omni", "packages")
        for path in sorted((ROOT / top).rglob("*.py"))
        for line in fragments(path)
    ]
    assert not found, "\n".join(found)


def test_fragments() -> None:
    assert FRAGMENT.match("Of a request.") and FRAGMENT.match("The same for images.")
    assert not FRAGMENT.match("Often right.") and not FRAGMENT.match("The samples.")
