# SPDX-License-Identifier: Apache-2.0
"""Conversations with the shipped omni model on the page of its server, as a visitor has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from coloured_shapes.language import describe, split_words
from coloured_shapes.recognizer import Recognizer
from tests.playground import browser as web
from tests.playground.conftest import KEY, NAME, PASSWORD
from tests.servers import RunningServer
from vllm_omni_talk.speech_recognition import count_understood

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright

GROUP = "playground"
pytestmark = pytest.mark.slow

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    browser = web.launch(playwright)
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser, talking_server: RunningServer) -> Iterator[Page]:
    page = open_chat(browser, talking_server)
    yield page
    page.context.close()


def open_chat(browser: Browser, server: RunningServer, **options: Any) -> Page:
    page = web.open_page(browser, f"{server.url}/playground", **options)
    web.log_in(page, NAME, PASSWORD)
    page.locator("#chat-box textarea").wait_for()
    return page


def test_asks_by_voice_about_a_picture_and_hears_the_answer(
    browser: Browser, talking_server: RunningServer, tmp_path: Path
) -> None:
    scene = web.draw_scene(tmp_path / "picture.png")
    page = open_chat(browser, talking_server, speaks=True)
    page.locator("#chat-box input[type=file]").set_input_files(tmp_path / "picture.png")
    page.locator("#chat-box .thumbnail-item").wait_for()
    web.speak(page, web.speech(talking_server.openai(api_key=KEY), web.QUESTION))
    web.send(page)
    heard = web.wait_until_played(page)
    web.expect(page.locator("#chat .bot audio")).to_have_count(1)  # In the chat, and only there.
    web.expect(web.answers(page).last).to_have_text(describe(scene))
    page.context.close()
    words = split_words(describe(scene))
    assert count_understood(words, Recognizer().words(heard, web.RATE)) >= 0.75 * len(words)


def ask_for_a_long_answer(page: Page) -> None:
    """A talker that prefers codes that it has said does not end. The settings are as before when it speaks."""
    page.get_by_text("Settings").click()
    penalty = page.get_by_label("repetition_penalty").nth(1)
    usual = penalty.input_value()
    web.fill_new(penalty, "0.1")
    web.send(page, "Say: a red circle")
    page.locator("#chat-player audio").wait_for()
    penalty.fill(usual)


def test_stopped_in_the_middle(page: Page, talking_server: RunningServer) -> None:
    before = web.num_aborted(talking_server.url, KEY)
    stop = page.locator("#chat-stop")
    assert stop.is_disabled()
    ask_for_a_long_answer(page)
    stop.click()
    page.locator("#chat-player audio").wait_for(state="detached")
    web.answers(page).get_by_text("Stopped.").wait_for()
    web.expect(stop).to_be_disabled()
    web.wait_until_aborted(talking_server.url, before, KEY)
    page.locator("#chat-clear").click()
    web.answers(page).first.wait_for(state="detached")
    web.send(page, "Say: a red circle")
    web.answers(page).get_by_text("A red circle.", exact=True).wait_for()
    web.expect(stop).to_be_disabled()
    assert web.answers(page).get_by_text("Stopped.").count() == 0


def test_a_message_ends_the_answer_before(page: Page, talking_server: RunningServer) -> None:
    before = web.num_aborted(talking_server.url, KEY)
    ask_for_a_long_answer(page)
    web.send(page, "Say: a red circle")
    web.answers(page).get_by_text("Stopped.").wait_for()
    web.answers(page).get_by_text("A red circle.", exact=True).nth(1).wait_for()
    web.answers(page).get_by_text("Stopped.").wait_for()  # One, and not at once: the page draws the chat again.
    web.wait_until_aborted(talking_server.url, before, KEY)
    assert web.wait_until_played(page).any()
    web.expect(page.locator("#chat-stop")).to_be_disabled()


def test_an_example_is_asked_at_a_click(page: Page) -> None:
    page.get_by_role("button", name="What is in the picture?").click()
    web.answers(page).get_by_text("A red circle is left of a blue square.", exact=True).wait_for()


def test_a_refused_picture_keeps_its_message(page: Page, tmp_path: Path) -> None:
    for name, reason in (("notes.pdf", "does not read files of this kind"), ("broken.png", "The server answered 400")):
        (tmp_path / name).write_bytes(b"no picture")
        page.locator("#chat-box input[type=file]").set_input_files(tmp_path / name)
        page.locator("#chat-box .thumbnail-item").wait_for()
        refusal = page.get_by_text(reason)
        for i in range(2):  # The second time as it was given back.
            web.send(page, "what is in the picture")
            if name == "notes.pdf":
                refusal.wait_for()
                page.get_by_test_id("toast-close").click()  # It would go by itself, but not at once.
                web.expect(refusal).to_have_count(0)
            else:
                refusal.nth(i).wait_for()
            web.expect(page.locator("#chat-box .thumbnail-item")).to_have_count(1)
            web.expect(page.locator("#chat-box textarea")).to_have_value("what is in the picture")
        page.get_by_label("Remove file").click()
    web.send(page, "Say: a red circle")
    web.answers(page).get_by_text("A red circle.", exact=True).wait_for()


def test_two_tabs_at_once(browser: Browser, page: Page, talking_server: RunningServer) -> None:
    other = open_chat(browser, talking_server)
    web.send(page, "Say: a red circle")
    web.send(other, "Say: a blue square")
    web.answers(page).get_by_text("A red circle.", exact=True).wait_for()
    web.answers(other).get_by_text("A blue square.", exact=True).wait_for()
    for each in (page, other):
        web.expect(web.answers(each)).to_have_count(1)
    other.context.close()


def test_the_browser_never_sees_the_key(browser: Browser, talking_server: RunningServer) -> None:
    assert httpx.get(f"{talking_server.url}/v1/models", timeout=60).status_code == 401
    assert httpx.get(f"{talking_server.url}/playground/config", timeout=60).status_code == 401
    context = browser.new_context()
    page = context.new_page()
    bodies: list[str] = []
    page.on("response", lambda answer: bodies.append(f"{answer.headers} {answer.request.headers} {_text(answer)}"))
    page.goto(f"{talking_server.url}/playground")
    web.log_in(page, NAME, PASSWORD)
    web.send(page, "Say: a red circle")
    web.answers(page).get_by_text("A red circle.", exact=True).wait_for()
    assert len(bodies) > 5
    assert not [body for body in bodies if KEY in body]
    context.close()


def _text(answer: Any) -> str:
    is_text = "event-stream" not in answer.headers.get("content-type", "") and answer.status == 200
    is_text = is_text and not answer.headers.get("content-type", "").startswith(("audio", "font", "image"))
    return answer.text() if is_text else ""


def test_an_error_says_what_the_server_said(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    web.fill_new(page.get_by_label("temperature").first, "-1")
    web.send(page, "Say: a red circle")
    error = web.answers(page).get_by_text("The server answered 400")
    error.wait_for()
    assert "temperature" in error.inner_text()
    assert "Traceback" not in page.content()
    web.expect(page.locator("#chat-box textarea")).to_have_value("Say: a red circle")


def test_a_stage_is_sampled_as_chosen(page: Page, talking_server: RunningServer) -> None:
    message: Any = {"role": "user", "content": "Say: a red circle"}
    client = talking_server.openai(api_key=KEY)
    answer = client.chat.completions.create(model="shapes", messages=[message], max_tokens=2)
    expected = answer.choices[0].message.content
    assert expected and expected != "A red circle."
    page.get_by_role("button", name="Settings").click()
    web.fill_new(page.get_by_label("max_tokens").first, "2")
    web.send(page, "Say: a red circle")
    web.answers(page).get_by_text(expected, exact=True).wait_for()
    page.get_by_label("temperature").nth(1).fill("hot")
    web.send(page, "Say: a red circle")
    page.get_by_text("temperature must be a number, not 'hot'").wait_for()


def test_the_stages_at_work_and_one_request(page: Page) -> None:
    web.send(page, "Say: a red circle")
    web.answers(page).get_by_text("A red circle.", exact=True).wait_for()
    web.expect(page.locator("#chat-stop")).to_be_disabled()  # Its speech has ended, too.
    assert web.stages_of_last_request(page) == ["thinker", "talker", "code2wav"]
    web.expect(page.locator("#stages-cards").get_by_text("ready")).to_have_count(3)


def test_the_timeline_moves_while_a_request_runs(page: Page) -> None:
    ask_for_a_long_answer(page)
    page.get_by_role("tab", name="Stages").click()
    talker = page.locator("#stages-timeline .row", has_text="talker").locator("span").last
    talker.wait_for()
    web.expect(talker).not_to_have_text(talker.inner_text())
    page.get_by_role("tab", name="Chat").click()
    page.locator("#chat-stop").click()
    web.answers(page).get_by_text("Stopped.").wait_for()


def test_on_a_phone(browser: Browser, talking_server: RunningServer) -> None:
    page = open_chat(browser, talking_server, **PHONE)
    page.locator("#chat-box textarea").fill("Say: a red circle")
    page.get_by_test_id("submit-button").tap()
    web.answers(page).get_by_text("A red circle.", exact=True).wait_for()
    for tab in ("Chat", "Realtime", "Speech", "Stages"):
        if not page.get_by_role("tab", name=tab).is_visible():
            page.locator(".overflow-menu button").tap()
        page.get_by_role("tab", name=tab).tap()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
    page.context.close()


def test_reads_a_text_aloud(page: Page) -> None:
    page.get_by_role("tab", name="Speech").click()
    web.fill_new(page.locator("#speech-text textarea"), "a red circle")
    page.locator("#speech-speak").click()
    heard = Recognizer().words(web.wait_until_played(page), web.RATE)
    assert count_understood(["red", "circle"], heard) == 2
    assert int.from_bytes(saved_speech(page)[:2]) >= 0xFFE0  # The first frame of MP3.
    assert web.stages_of_last_request(page) == ["thinker", "talker", "code2wav"]


def saved_speech(page: Page) -> bytes:
    """The file of the tab, as a visitor downloads it."""
    with page.expect_download() as download:
        page.locator("#speech-file").get_by_label("Download").click()
    return Path(download.value.path()).read_bytes()


@pytest.mark.parametrize(("name", "begins"), [("wav", b"RIFF"), ("flac", b"fLaC"), ("opus", b"OggS")])
def test_speech_has_the_format_that_was_chosen(page: Page, name: str, begins: bytes) -> None:
    page.get_by_role("tab", name="Speech").click()
    web.fill_new(page.locator("#speech-text textarea"), "a red circle")
    page.get_by_label("Format").click()
    page.get_by_role("option", name=name).click()
    page.locator("#speech-speak").click()
    assert web.wait_until_played(page).any()
    assert saved_speech(page).startswith(begins)
    web.expect(page.locator("#speech-stop")).to_be_disabled()


def test_offers_what_the_model_does(page: Page) -> None:
    assert web.tabs(page) == ["Chat", "Realtime", "Speech", "Stages"]
    assert page.locator("#heading h1").inner_text() == "shapes"
    assert page.locator("link[rel=icon]").get_attribute("href").startswith("data:image/svg+xml")  # type: ignore[union-attr]
