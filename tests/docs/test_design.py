# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/design and the packages that they are about name each other; decisions are a table."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, prose

DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))
PACKAGES = sorted((ROOT / "vllm_omni").rglob("__init__.py"))
DOCSTRINGS = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in PACKAGES]
REFERENCE = re.compile(r"docs/design/\w+\.md")
FILE = re.compile(r"`((?:\w+/)*\w+\.(?:py|sh))`")


def test_packages_refer_to_pages() -> None:
    named = {reference for text in DOCSTRINGS for reference in REFERENCE.findall(text)}
    assert named == {page.relative_to(ROOT).as_posix() for page in DESIGN}


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.stem)
def test_files_of_a_page_exist(page: Path) -> None:
    files = [path.as_posix() for top in ("vllm_omni", "tests", "scripts") for path in (ROOT / top).rglob("*.*")]
    assert [name for name in FILE.findall(prose(page)) if not any(path.endswith(f"/{name}") for path in files)] == []


def test_decisions_are_a_table_in_order() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text()
    assert not re.search(r"^## ", text, re.MULTILINE), "a decision is a row; its reasons are on the page of its subject"
    rows = re.findall(r"^\| (\d+) \| \d{4}-\d\d-\d\d \| \S.* \|.* \|.*\|$", text, re.MULTILINE)
    numbers = [int(row) for row in rows]
    assert numbers == sorted(set(numbers)) and len(rows) == text.count("\n| ") - 1


def test_pages_refer_to_decisions_that_hold() -> None:
    text = (ROOT / "docs" / "decisions.md").read_text()
    numbers = set(re.findall(r"^\| (\d+) \|", text, re.MULTILINE))
    assert [number for page in DESIGN for number in referred(page) if number not in numbers] == []


def referred(page: Path) -> list[str]:
    """The decisions that a page names, in brackets at the ends of sentences."""
    lists = re.findall(r"\((?:decisions? )?(\d{1,3}(?:,\s+\d{1,3})*)(?: in part)?\)", page.read_text())
    return [number for one in lists for number in re.split(r",\s+", one)]


def test_times_of_pages_are_those_of_the_code() -> None:
    named = [found for page in DESIGN for found in re.findall(r"(\d+(?:\.\d+)?) s\s+\(`(\w+)`\)", page.read_text())]
    code = "\n".join(path.read_text() for path in (ROOT / "vllm_omni").rglob("*.py"))
    wrong = [(number, name) for number, name in named if not re.search(rf"^{name} = {float(number)}$", code, re.M)]
    assert named and wrong == []
