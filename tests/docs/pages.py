# SPDX-License-Identifier: Apache-2.0
"""Reads the pages of the documentation."""

import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_WILDCARD = re.compile(r"(\.\.\.|\d\d-\d\d \d\d:\d\d:\d\d|\d+(?:\.\d+)?(?= m?s\b))")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A fenced block.

    Attributes:
        answer: What the page shows as its output: the next block, if that is a `text`.
    """

    page: Path
    line: int
    language: str
    text: str
    answer: str | None = None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets(*languages: str, pages: list[Path] = PAGES) -> list[Snippet]:
    """The fenced blocks of these languages, with the indentation of the fence removed."""
    found = []
    for page in pages:
        text = page.read_text()
        fences = list(_FENCE.finditer(text))
        for fence, following in zip_longest(fences, fences[1:]):
            if fence[2] in languages:
                answer = _body(following) if following and following[2] == "text" else None
                line = text[: fence.start()].count("\n") + 1
                found.append(Snippet(page, line, fence[2], _body(fence), answer))
    return found


def _body(fence: re.Match[str]) -> str:
    return re.sub(f"^{fence[1]}", "", fence[3], flags=re.MULTILINE)


def is_answer(shown: str, output: str) -> bool:
    """Whether an output is what a page shows, where `...` is anything in its line, alone any lines, and a time any."""
    pattern = "".join("(?:.*\n)*?" if line == "..." else _line_pattern(line) for line in shown.splitlines())
    return re.fullmatch(pattern, output.rstrip("\n") + "\n") is not None


def _line_pattern(line: str) -> str:
    fixed, *others = _WILDCARD.split(line)  # wildcards, each followed by fixed text
    wild = zip(others[::2], others[1::2], strict=True)
    parts = ((".*?" if wildcard == "..." else r"[-:. \d]+") + re.escape(text) for wildcard, text in wild)
    return f"{re.escape(fixed)}{''.join(parts)} *\n"


def prose(page: Path) -> str:
    """The text without fenced blocks."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as the site and GitHub make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}
