# SPDX-License-Identifier: Apache-2.0
"""Uses Open WebUI itself with the shipped models: `python scripts/try_open_webui.py [FOLDER]`.

Installs it into a temporary environment, or into FOLDER if that has none yet (Python 3.11 or 3.12, several GB), starts
it on this machine with the settings of docs/clients.md, and uses it in Chromium (`make programs`): the list of voices,
an answer read aloud, and a picture. Recognizers judge what it gets. Writes docs/images/open_webui_*.webp. It is too
large for the tests, which send the same requests (tests/clients/test_recorded_requests.py).
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from screenshots import save  # noqa: E402

from tests.clients.tasks import SENTENCE, says, shows  # noqa: E402
from tests.playground import browser as web  # noqa: E402
from tests.servers import RunningServer, answers, free_port, running_program  # noqa: E402

PACKAGE = "open-webui==0.12.4"
KEY = "key-of-the-server"
VIEW = {"viewport": {"width": 1100, "height": 800}}


def settings(url: str, painter_url: str, data: Path) -> dict[str, str]:
    """Environment variables; all but the last group are those of docs/clients.md."""
    return {
        "OPENAI_API_BASE_URL": url,
        "OPENAI_API_KEY": KEY,
        "AUDIO_TTS_ENGINE": "openai",
        "AUDIO_TTS_OPENAI_API_BASE_URL": url,
        "AUDIO_TTS_OPENAI_API_KEY": KEY,
        "AUDIO_TTS_MODEL": "shapes",
        "AUDIO_TTS_VOICE": "ben",
        "AUDIO_STT_ENGINE": "openai",
        "AUDIO_STT_OPENAI_API_BASE_URL": url,
        "AUDIO_STT_OPENAI_API_KEY": KEY,
        "AUDIO_STT_MODEL": "shapes",
        "ENABLE_IMAGE_GENERATION": "true",
        "IMAGE_GENERATION_ENGINE": "openai",
        "IMAGES_OPENAI_API_BASE_URL": painter_url,
        "IMAGES_OPENAI_API_KEY": KEY,
        "IMAGE_GENERATION_MODEL": "shapes-painter",
        "IMAGE_SIZE": "96x96",
        "ENABLE_IMAGE_PROMPT_GENERATION": "false",
        "DEFAULT_MODEL_PARAMS": '{"function_calling": "legacy"}',
        # One user, nothing from the network, and no requests in the background.
        "DATA_DIR": str(data),
        "WEBUI_AUTH": "false",
        "WEBUI_SECRET_KEY": "of this run",
        "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai",
        "ENABLE_OLLAMA_API": "false",
        "ENABLE_TITLE_GENERATION": "false",
        "ENABLE_TAGS_GENERATION": "false",
        "ENABLE_FOLLOW_UP_GENERATION": "false",
    }


def install(folder: Path) -> Path:
    """Its program."""
    program = folder / "bin" / "open-webui"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for package in ("pip>=26", PACKAGE):  # Python's own pip may be old, and then takes minutes to read the indexes.
            subprocess.run([folder / "bin" / "python", "-m", "pip", "install", package], check=True)
    return program


@contextmanager
def running(program: Path, variables: dict[str, str], folder: Path) -> Iterator[str]:
    """Its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    log = folder / "open_webui.txt"
    command = [program, "serve", "--host=127.0.0.1", f"--port={port}"]
    kill = signal.SIGKILL  # On SIGTERM it waits for the browser's connections.
    with running_program(command, lambda: answers(f"{url}/health"), log, env=environment, cwd=folder, ends_with=kill):
        yield url


def list_voices(page: Page, url: str) -> None:
    """The voices in a user's settings are the server's."""
    with page.expect_response("**/api/v1/audio/voices") as answer:
        page.goto(f"{url}/?settings=audio")
    voices = answer.value.json()["voices"]
    assert [voice["id"] for voice in voices] == ["ada", "ben"], voices
    page.get_by_text("Set Voice").wait_for()
    save(page, "open_webui_voices")


def read_aloud(page: Page, url: str) -> None:
    """An answer is what the model says, and its speech is played."""
    page.goto(f"{url}/?model=shapes&q=Say: {SENTENCE}")
    page.locator("#send-message-button").click()
    button = page.locator("[id^=speak-button-]")
    with page.expect_response("**/api/v1/audio/speech") as speech:
        button.click()
    assert page.locator(".chat-assistant").inner_text().strip() == SENTENCE
    again = page.request.fetch(speech.value.request)  # Chromium does not keep what a page reads as a Blob.
    assert says(again.body(), SENTENCE)
    save(page, "open_webui_chat")


def paint(page: Page, url: str) -> None:
    """A picture of a prompt is in the chat."""
    page.goto(f"{url}/?model=shapes&image-generation=true&q={SENTENCE}")
    page.locator("#send-message-button").click()
    picture = page.locator(".chat-assistant img[src*='/files/']")
    address = picture.get_attribute("src")
    assert shows(page.request.get(f"{url}{address}").body(), SENTENCE)
    save(page, "open_webui_picture")


def main(environment: Path, folder: Path) -> None:
    program = install(environment)
    flags = (f"--api-key={KEY}", "--public-lists")
    servers: list[RunningServer] = []
    try:
        for model in ("shapes", "shapes-painter"):
            servers.append(RunningServer(model, *flags, log=folder / f"{model}.txt"))
        variables = settings(*(f"{server.url}/v1" for server in servers), folder / "data")
        with running(program, variables, folder) as url, sync_playwright() as playwright:
            browser = web.launch(playwright)
            page = web.open_page(browser, url, **VIEW)
            page.get_by_role("button", name="Okay, Let's Go!").click()
            list_voices(page, url)
            read_aloud(page, url)
            paint(page, url)
            browser.close()
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary, "environment"), Path(temporary))
