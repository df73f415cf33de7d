# SPDX-License-Identifier: Apache-2.0
"""Makes the screenshots of docs/playground.md: `python scripts/screenshots.py`.

Needs Chromium (`make programs`). Starts the shipped models with their pages, uses these as a visitor does, and writes
docs/images/playground_*.webp.
"""

import io
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from coloured_shapes.language import random_dialogue, random_scene  # noqa: E402
from coloured_shapes.pictures import draw  # noqa: E402
from tests.playground import browser as web  # noqa: E402
from tests.servers import RunningServer  # noqa: E402

IMAGES = ROOT / "docs" / "images"
QUALITY = 80
DESKTOP: Any = {"viewport": {"width": 1100, "height": 900}}
PHONE: Any = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = web.launch(playwright)
        talk(browser, Path(folder))
        paint(browser, Path(folder))
        browser.close()


def talk(browser: Browser, folder: Path) -> None:
    """Each tab of a model that talks, on a computer; and a question on a phone."""
    rng = random.Random(3)
    scene = random_scene(rng, held_out=True)
    draw(rng, scene).resize((256, 256), Image.Resampling.NEAREST).save(folder / "picture.png")
    server = RunningServer("shapes", "--playground", log=folder / "server.txt")
    try:
        page = web.open_page(browser, f"{server.url}/playground", speaks=True, **DESKTOP)
        page.locator("#chat-box input[type=file]").set_input_files(folder / "picture.png")
        page.locator("#chat-box .thumbnail-item").wait_for()
        web.speak(page, web.speech(server.openai(), random_dialogue(rng, scene)[0].question))
        web.send(page)
        watch(page)
        page.get_by_role("tab", name="Chat").click()
        save(page, "playground_chat")
        read(page)
        converse(browser, server, folder / "picture.png")
        phone = web.open_page(browser, f"{server.url}/playground", **PHONE)
        web.send(phone, "Say: a red circle")
        web.wait_until_played(phone)
        save(phone, "playground_phone")
    finally:
        server.stop()


def watch(page: Page) -> None:
    """The stages, while a request runs and until its speech was heard."""
    page.get_by_role("tab", name="Stages").click()
    web.wait_until_played(page)
    page.locator("#stages-timeline .track i").first.wait_for()
    save(page, "playground_stages")


def read(page: Page) -> None:
    """A text that is read aloud."""
    page.get_by_role("tab", name="Speech").click()
    web.fill_new(page.locator("#speech-text textarea"), "A red circle is left of a blue square.")
    page.locator("#speech-speak").click()
    web.wait_until_played(page)
    page.locator("#speech-file").get_by_label("Download").wait_for()
    save(page, "playground_speech")


def converse(browser: Browser, server: RunningServer, picture: Path) -> None:
    """Spoken questions about a picture, in a realtime session."""
    page = web.open_page(browser, f"{server.url}/playground", speaks=True, **DESKTOP)
    page.get_by_role("tab", name="Realtime").click()
    web.attach_to_call(page, picture)
    page.get_by_label("Transcribe what I say").uncheck()
    page.get_by_role("button", name="Settings").click()
    page.locator("#realtime-talk").click()
    state = page.locator("#realtime-call .state")
    for question in (web.QUESTION, "how many shapes are there"):
        state.get_by_text("Listening").wait_for()
        page.evaluate("samples => window.say(samples)", web.speech(server.openai(), question).tolist())
        state.get_by_text("Speaking").wait_for()
    save(page, "playground_realtime")
    page.locator("#realtime-stop").click()


def paint(browser: Browser, folder: Path) -> None:
    """A painting."""
    server = RunningServer("shapes-painter", "--playground", log=folder / "painter.txt")
    try:
        page = web.open_page(browser, f"{server.url}/playground", **DESKTOP)
        page.locator("#images-prompt textarea").fill("A red circle is left of a blue square.")
        page.locator("#images-generate").click()
        page.locator("#images-state").get_by_text("1 of 1 complete").wait_for()
        page.locator("#images-gallery img").first.wait_for()
        save(page, "playground_images")
    finally:
        server.stop()


def save(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    picture.save(IMAGES / f"{name}.webp", quality=QUALITY)


if __name__ == "__main__":
    main()
