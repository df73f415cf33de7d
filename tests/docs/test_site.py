# SPDX-License-Identifier: Apache-2.0
"""The site as a reader opens it from a disk, without a network: `make docs` runs this on the site that it has built."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import ROOT
from tests.playground import browser as web
from tests.playground.conftest import skip_without_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DIAGRAMS = runpy.run_path(str(ROOT / "scripts" / "diagrams.py"))


def skip_without_site() -> None:
    if "OMNI_SITE" not in os.environ:
        pytest.skip("needs a site (`make docs` builds one, and runs this)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    skip_without_site()
    skip_without_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield web.launch(playwright)


@pytest.fixture(params=[1280, 390])
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of this width. Whatever it looks for outside of the site, and every error in it, fails the test."""
    context = browser.new_context(viewport={"width": request.param, "height": 900}, offline=True)
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda sent: problems.append(sent.url))
    page.on("request", lambda sent: None if sent.url.startswith(("file:", "data:")) else problems.append(sent.url))
    yield page
    context.close()
    assert problems == []


def address(name: str) -> str:
    return (ROOT / os.environ["OMNI_SITE"] / name).as_uri()


@pytest.mark.parametrize("name", ["index.html", "quickstart.html", "adding_a_model.html", "design/feedback.html"])
def test_a_page_fits_and_has_its_pictures(page: Page, name: str) -> None:
    page.goto(address(name))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    if (diagram := page.locator(".diagram svg")).count():
        box = diagram.first.bounding_box()
        assert box is not None and box["height"] > 50
    assert page.locator(".mermaid").count() == 0


def test_the_search_finds_a_page(page: Page) -> None:
    page.goto(address("design/vocoder.html"))
    if (opened := page.locator("label.md-header__button[for=__search]")).is_visible():
        opened.click()
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").type("quickstart")
    page.locator(".md-search-result__link", has_text="Quickstart").first.click()
    page.wait_for_url(address("quickstart.html") + "**")
    assert page.locator("article h1").inner_text().startswith("Quickstart")


@pytest.mark.parametrize(
    ("tag", "is_refused"),
    [
        ('<script src="https://unpkg.com/mermaid"></script>', True),
        ("<link rel=stylesheet href=//fonts.example.com/a.css>", True),
        ('<img alt="a" src="http://example.com/a.png">', True),
        ('<a href="https://example.com/">a link</a><img src="images/a.png">', False),
    ],
)
def test_a_page_that_loads_from_elsewhere_fails_the_build(
    tag: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_site()
    from mkdocs.exceptions import PluginError

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    check = runpy.run_path(str(ROOT / "scripts" / "docs_hooks.py"))["on_post_page"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    with pytest.raises(PluginError, match=r"a\.md: loads ") if is_refused else nullcontext():
        assert check(tag, page, None) == tag


def test_every_diagram_is_drawn() -> None:
    found = DIAGRAMS["find_diagrams"]()
    assert set(DIAGRAMS["FOLDER"].glob("*.svg")) == found.keys(), "run scripts/diagrams.py"
    assert len(found) >= 4
