# SPDX-License-Identifier: Apache-2.0
"""Links between pages, to files of the repository, and to headings."""

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, anchors, prose

LINK = re.compile(r"\]\(([^)\s]+)\)")


READMES = [*sorted(ROOT.glob("packages/*/README.md")), ROOT / "training" / "README.md"]


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """Without the tags of Python objects."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.name != "README.md"}
    assert pages <= set(_flatten(nav))


def _flatten(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    entries = entry if isinstance(entry, list) else list(entry.values())  # type: ignore[attr-defined]
    return [page for part in entries for page in _flatten(part)]
