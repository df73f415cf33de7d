# SPDX-License-Identifier: Apache-2.0
"""Images and videos on the page beside a server; and a server that dies and comes back."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from PIL import Image

from coloured_shapes.checker import agrees, find_shapes
from tests.playground import browser as web
from tests.servers import ENDLESS, ENDLESS_STEPS, SAME_PAINTING, RunningServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright, Route

GROUP = "server"
pytestmark = pytest.mark.slow
SENTENCE = "A red circle is left of a blue square."


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    browser = web.launch(playwright)
    yield browser
    browser.close()


LONG = "1000"
"""Steps of a painting that a test ends. A quarter of them is over before the first preview."""


def paint(page: Page, sentence: str = SENTENCE) -> None:
    page.locator("#images-prompt textarea").fill(sentence)
    page.locator("#images-generate").click()


def stop(page: Page, tab: str, running: str) -> None:
    """Clicks Stop, and has the server hear of it only after another update, which replaces what the page says of it."""
    held: list[Route] = []
    page.route("**/cancel", lambda route: held.append(route))
    state = page.locator(f"#{tab}-state")
    page.locator(f"#{tab}-stop").click()
    state.get_by_text("Stopped").wait_for()
    state.get_by_text(running).wait_for()
    held.pop().continue_()
    page.unroute("**/cancel")
    state.get_by_text("Stopped").wait_for()


def painting(page: Page) -> Image.Image:
    page.locator("#images-state").get_by_text("1 of 1 complete").wait_for()
    address = page.locator("#images-gallery img").first.get_attribute("src")
    assert address is not None
    return Image.open(io.BytesIO(httpx.get(address, timeout=60).content)).convert("RGB")


@pytest.fixture
def painting_server(tmp_path: Path) -> Iterator[list[RunningServer]]:
    """A server for the shipped image model, which a test may replace."""
    servers = [RunningServer("shapes-painter", ENDLESS_STEPS, SAME_PAINTING, log=tmp_path / "server.txt")]
    yield servers
    servers[-1].stop()


def test_paints_stops_and_lives_on_when_the_server_dies(
    browser: Browser, painting_server: list[RunningServer], tmp_path: Path
) -> None:
    (server,) = painting_server
    with web.playground(server.url, tmp_path / "page.txt") as url:
        page = web.open_page(browser, url)
        assert web.tabs(page) == ["Images", "Stages"]
        assert page.locator("#images-stop").is_disabled()
        page.get_by_role("button", name=SENTENCE).click()  # An example.
        page.wait_for_function("text => document.querySelector('#images-prompt textarea').value === text", arg=SENTENCE)
        page.locator("#images-generate").click()
        assert agrees(find_shapes(painting(page)), SENTENCE)
        web.expect(page.locator("#images-stop")).to_be_disabled()
        assert web.stages_of_last_request(page) == ["diffusion"]
        page.get_by_role("tab", name="Images").click()

        page.get_by_role("button", name="Settings").click()
        steps = page.get_by_label("num_inference_steps")
        usual = steps.input_value()
        web.fill_new(steps, LONG)
        before = web.num_aborted(server.url)
        paint(page)
        page.locator("#images-state").get_by_text("A preview").wait_for()
        stop(page, "images", "A preview")
        web.expect(page.locator("#images-stop")).to_be_disabled()
        web.wait_until_aborted(server.url, before)

        paint(page)
        page.locator("#images-state").get_by_text("A preview").wait_for()
        server.stop(signal.SIGKILL)
        page.locator("#images-state").get_by_text("does not answer, or stopped in the middle").wait_for()
        assert "Traceback" not in page.content()

        steps.fill(usual)
        painting_server.append(
            RunningServer("shapes-painter", ENDLESS_STEPS, SAME_PAINTING, port=server.port, log=tmp_path / "again.txt")
        )
        paint(page)
        assert agrees(find_shapes(painting(page)), SENTENCE)


def test_makes_a_video_and_stops(browser: Browser, video_server: RunningServer, tmp_path: Path) -> None:
    with web.playground(video_server.url, tmp_path / "page.txt") as url:
        page = web.open_page(browser, url)
        assert web.tabs(page) == ["Videos", "Stages"]
        page.locator("#videos-prompt textarea").fill("A hen.")
        page.get_by_role("button", name="Settings").click()
        steps = page.get_by_label("num_inference_steps")
        usual = steps.input_value()
        web.fill_new(steps, ENDLESS)
        before = web.num_aborted(video_server.url)
        page.locator("#videos-generate").click()
        page.locator("#videos-state").get_by_text("in progress").wait_for()
        page.locator("#videos-state [role=progressbar]").wait_for()
        stop(page, "videos", "in progress")
        web.wait_until_aborted(video_server.url, before)

        steps.fill(usual)
        page.locator("#videos-generate").click()
        page.locator("#videos-state").get_by_text("Complete").wait_for()
        page.locator("#videos-video video").wait_for()
        assert page.wait_for_function("document.querySelector('#videos-video video').duration > 0")
        assert web.stages_of_last_request(page) == ["diffusion"]
