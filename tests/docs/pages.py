# SPDX-License-Identifier: Apache-2.0
"""Reads the pages of the documentation."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets(*languages: str, pages: list[Path] = PAGES) -> list[Snippet]:
    """The fenced blocks of these languages, with the indentation of the fence removed."""
    found = []
    for page in pages:
        text = page.read_text()
        for fence in _FENCE.finditer(text):
            if fence[2] in languages:
                body = re.sub(f"^{fence[1]}", "", fence[3], flags=re.MULTILINE)
                found.append(Snippet(page, text[: fence.start()].count("\n") + 1, fence[2], body))
    return found


def prose(page: Path) -> str:
    """The text without fenced blocks."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as the site and GitHub make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}
