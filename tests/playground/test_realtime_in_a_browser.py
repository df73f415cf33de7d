# SPDX-License-Identifier: Apache-2.0
"""Spoken conversations with the shipped omni model on the page of its server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coloured_shapes.language import describe, split_words
from coloured_shapes.recognizer import Recognizer
from tests.playground import browser as web
from tests.playground.conftest import KEY, NAME, PASSWORD
from tests.servers import RunningServer
from vllm_omni_talk.speech_recognition import count_understood

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


RECORD_STATES = """() => {
  const state = document.querySelector("#realtime-call .state"), level = document.querySelector(".level span");
  window.states = [state.innerText];
  window.levels = {};
  const see = () => {
    if (window.states.at(-1) !== state.innerText) window.states.push(state.innerText);
    const width = parseFloat(level.style.width) || 0;
    window.levels[state.innerText] = Math.max(window.levels[state.innerText] ?? 0, width);
  };
  new MutationObserver(see).observe(state, {childList: true});
  new MutationObserver(see).observe(level, {attributes: true});
}"""
"""The states of a call, in order, and the highest level in each."""


def test_asks_by_voice_and_hears_the_answer(page: Page, talking_server: RunningServer, tmp_path: Path) -> None:
    scene = web.draw_scene(tmp_path / "picture.png")
    web.attach_to_call(page, tmp_path / "picture.png")
    talk, stop = page.locator("#realtime-talk"), page.locator("#realtime-stop")
    assert stop.is_disabled()
    call(page)
    web.expect(talk).to_be_disabled()
    question = web.speech(talking_server.openai(api_key=KEY), web.QUESTION).tolist()
    page.evaluate(RECORD_STATES)
    page.evaluate("samples => window.say(samples)", question)
    state(page, "Speaking").wait_for()
    state(page, "Listening").wait_for()
    web.expect(lines(page, "user").last).to_have_text(re.compile(r"\.$"))  # A transcript comes beside the answer.
    stop.click()
    state(page, "Ended").wait_for()
    web.expect(stop).to_be_disabled()
    web.expect(talk).to_be_enabled()
    assert page.evaluate("window.states") == ["Listening", "Thinking", "Speaking", "Listening", "Ended"]
    assert page.evaluate("window.levels.Listening > 0 && window.levels.Speaking > 0")
    assert page.locator("#realtime-call .delay").inner_text().startswith("first sound after ")
    heard = web.played(page)
    assert lines(page, "assistant").all_inner_texts() == [describe(scene)]
    picture, text = lines(page, "user").all_inner_texts()
    assert picture == "[picture]" and text[-1] == "."  # Not the question: the model was not trained to transcribe it.
    words = split_words(describe(scene))
    assert count_understood(words, Recognizer().words(heard, web.RATE)) >= 0.75 * len(words)


INTERRUPT = """samples => {
  const state = document.querySelector("#realtime-call .state");
  const observer = new MutationObserver(() => {
    if (state.innerText !== "Speaking") return;
    observer.disconnect();
    window.say(samples);
  });
  observer.observe(state, {childList: true});
}"""
"""Says something as soon as the next answer is heard: the server has until its end to notice that."""
LONG_ANSWER = 11
"""The seed of a scene of three shapes."""


def test_speaking_stops_the_answer(page: Page, talking_server: RunningServer, tmp_path: Path) -> None:
    scene = web.draw_scene(tmp_path / "picture.png", LONG_ANSWER)
    web.attach_to_call(page, tmp_path / "picture.png")
    page.get_by_label("Transcribe what I say").uncheck()
    call(page)
    question = web.speech(talking_server.openai(api_key=KEY), web.QUESTION).tolist()
    page.evaluate(INTERRUPT, question)
    page.evaluate("samples => window.say(samples)", question)
    lines(page, "assistant").first.get_by_text("—").wait_for()
    state(page, "Speaking").wait_for()
    state(page, "Listening").wait_for()
    remembered, whole = (split_words(text) for text in lines(page, "assistant").all_inner_texts())
    assert whole == split_words(describe(scene))
    assert remembered == whole[: len(remembered)] and len(remembered) < len(whole)
    assert lines(page, "user").count() == 3 and lines(page, "error").count() == 0


def test_a_refused_picture_ends_the_call(page: Page, tmp_path: Path) -> None:
    web.draw_scene(tmp_path / "picture.png")
    web.attach_to_call(page, tmp_path / "picture.png")
    page.evaluate(
        """() => {
          const start = window.realtime.start;
          window.realtime.start = (root, fields) => start(root, {...fields, picture: "data:image/png;base64,AAAA"});
        }"""
    )
    page.locator("#realtime-talk").click()
    state(page, "Ended").wait_for()
    assert lines(page, "error").count() == 1
    web.expect(page.locator("#realtime-stop")).to_be_disabled()
    web.expect(page.locator("#realtime-talk")).to_be_enabled()
