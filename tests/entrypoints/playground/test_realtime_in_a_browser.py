# SPDX-License-Identifier: Apache-2.0
"""Spoken conversations with the shipped omni model on the page of its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coloured_shapes.language import describe, split_words
from coloured_shapes.recognizer import Recognizer
from tests.entrypoints.playground import browser as web
from tests.entrypoints.playground.conftest import KEY, NAME, PASSWORD
from tests.servers import RunningServer
from vllm_omni.speech_recognition import count_understood

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Playwright

GROUP = "playground"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _needs_turn_detection() -> None:
    pytest.importorskip("silero_vad", reason="needs silero-vad (extra `realtime`)")


@pytest.fixture
def page(playwright: Playwright, talking_server: RunningServer) -> Iterator[Page]:
    """The tab, with a microphone that hears what `window.say` is given."""
    browser = web.launch(playwright)
    yield open_tab(browser, talking_server, speaks=True)
    browser.close()


def open_tab(browser: Browser, server: RunningServer, **options: Any) -> Page:
    page = web.open_page(browser, f"{server.url}/playground", **options)
    web.log_in(page, NAME, PASSWORD)
    page.get_by_role("tab", name="Realtime").click()
    return page


def call(page: Page) -> None:
    page.locator("#realtime-talk").click()
    page.locator("#realtime-call .state").get_by_text("Listening").wait_for()


def state(page: Page, text: str) -> Locator:
    return page.locator("#realtime-call .state").get_by_text(text, exact=True)


def lines(page: Page, kind: str) -> Locator:
    """What the user or the assistant has said."""
    return page.locator(f"#realtime-call .{kind}")


def test_asks_by_voice_and_hears_the_answer(page: Page, talking_server: RunningServer, tmp_path: Path) -> None:
    scene = web.draw_scene(tmp_path / "picture.png")
    web.attach_to_call(page, tmp_path / "picture.png")
    call(page)
    question = web.speech(talking_server.openai(api_key=KEY), web.QUESTION).tolist()
    page.evaluate("samples => window.say(samples)", question)
    state(page, "Speaking").wait_for()
    state(page, "Listening").wait_for()
    page.locator("#realtime-stop").click()
    state(page, "Ended").wait_for()
    heard = web.played(page)
    assert lines(page, "assistant").all_inner_texts() == [describe(scene)]
    picture, text = lines(page, "user").all_inner_texts()
    assert picture == "🖼" and text[-1] == "."  # Not the question: the model was not trained to transcribe it.
    words = split_words(describe(scene))
    assert count_understood(words, Recognizer().words(heard, web.RATE)) >= 0.75 * len(words)


def test_speaking_stops_the_answer(page: Page, talking_server: RunningServer, tmp_path: Path) -> None:
    scene = web.draw_scene(tmp_path / "picture.png")
    web.attach_to_call(page, tmp_path / "picture.png")
    page.get_by_label("Transcribe what I say").uncheck()
    call(page)
    question = web.speech(talking_server.openai(api_key=KEY), web.QUESTION).tolist()
    page.evaluate("samples => window.say(samples)", question)
    state(page, "Speaking").wait_for()
    page.evaluate("samples => window.say(samples)", question)
    lines(page, "assistant").first.get_by_text("—").wait_for()
    state(page, "Speaking").wait_for()
    state(page, "Listening").wait_for()
    remembered, whole = (split_words(text) for text in lines(page, "assistant").all_inner_texts())
    assert whole == split_words(describe(scene))
    assert remembered == whole[: len(remembered)] and len(remembered) < len(whole)
    assert lines(page, "user").count() == 3 and lines(page, "error").count() == 0
