# SPDX-License-Identifier: Apache-2.0
"""A real browser for tests of the page, with a microphone that hears what a test says and a record of what it plays."""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import soundfile

from coloured_shapes.language import Scene, random_scene
from coloured_shapes.pictures import draw
from tests.servers import answers as answers_to
from tests.servers import free_port, running_program

if TYPE_CHECKING:
    from openai import OpenAI
    from playwright.sync_api import Browser, Locator, LocatorAssertions, Page, Playwright

CHROMIUM = shutil.which("chromium")
PATIENCE_MS = 240_000
"""Of every wait: it only reports a failure before pytest's own limit."""
RATE = 24000
"""Samples per second of `played`."""
QUESTION = "what is in the picture"
"""Spoken, the shipped model understands it with up to a second of silence behind it."""

# A sound may have ended before the clock of its context says so: here it always has.
LATE_CLOCK = """
const clock = Object.getOwnPropertyDescriptor(BaseAudioContext.prototype, "currentTime").get;
Object.defineProperty(BaseAudioContext.prototype, "currentTime", {
  get() { return Math.max(0, clock.call(this) - 0.05); },
});
"""
# What reaches a sound card goes through a tap. Media events do not bubble, but they can be captured: a player is tapped
# before it plays.
RECORD = f"""
window.played = [];
const connect = AudioNode.prototype.connect;
const tapOf = context => {{
  if (!context.tap) {{
    context.tap = context.createScriptProcessor(4096, 1, 1);
    context.tap.onaudioprocess = ({{inputBuffer, outputBuffer}}) => {{
      const samples = inputBuffer.getChannelData(0);
      outputBuffer.copyToChannel(samples, 0);
      if (samples.some(sample => sample)) window.played.push(Array.from(samples));
    }};
    connect.call(context.tap, context.destination);
  }}
  return context.tap;
}};
AudioNode.prototype.connect = function(node, ...rest) {{
  return connect.call(this, node instanceof AudioDestinationNode ? tapOf(this.context) : node, ...rest);
}};
document.addEventListener("loadstart", event => {{
  const player = event.target;
  if (!player.closest("[id$=-player]")) return;
  window.isHeard = false;
  if (player.isTapped) return;
  player.isTapped = true;
  const context = new AudioContext({{sampleRate: {RATE}}});
  context.createMediaElementSource(player).connect(context.destination);
}}, true);
document.addEventListener("ended", event => window.isHeard ||= event.target.closest("[id$=-player]") !== null, true);
"""
# A microphone that hears what a test says, when it says it: before, and after its last words, not even silence. A page
# shows that it records before it does.
MICROPHONE = f"""
const startRecording = MediaRecorder.prototype.start;
MediaRecorder.prototype.start = function(...options) {{
  startRecording.apply(this, options);
  window.isRecorded = true;
}};
const openDevice = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
const ears = new AudioContext({{sampleRate: {RATE}}});
const microphone = ears.createMediaStreamDestination();
navigator.mediaDevices.getUserMedia = async constraints => {{
  await openDevice(constraints);
  return microphone.stream.clone();
}};
window.say = async (samples, isLast = false) => {{
  const buffer = ears.createBuffer(1, samples.length, {RATE});
  buffer.copyToChannel(Float32Array.from(samples), 0);
  const source = ears.createBufferSource();
  source.buffer = buffer;
  source.connect(microphone);
  await ears.resume();
  source.start();
  await new Promise(resolve => source.onended = resolve);
  if (isLast) await ears.suspend();
}};
"""


def launch(playwright: Playwright) -> Browser:
    flags = ["--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    # A server of sounds that does not exist: in search of one, PulseAudio's library leaves a folder of its own.
    env: dict[str, str | float | bool] = {**os.environ, "PULSE_SERVER": "unix:/dev/null"}
    return playwright.chromium.launch(executable_path=CHROMIUM, args=flags, env=env)


def open_page(browser: Browser, url: str, *, speaks: bool = False, **options: object) -> Page:
    """A visitor's page in a context of its own.

    Args:
        speaks: Its microphone hears what `window.say` is given.
        options: The context's.
    """
    page = browser.new_context(**options).new_page()  # type: ignore[arg-type]
    page.set_default_timeout(PATIENCE_MS)
    page.add_init_script(LATE_CLOCK + RECORD + (MICROPHONE if speaks else ""))
    page.goto(url)
    return page


def log_in(page: Page, name: str, password: str) -> None:
    page.get_by_label("username").fill(name)
    page.get_by_label("password").fill(password)
    page.get_by_role("button", name="Login").click()


def expect(locator: Locator) -> LocatorAssertions:
    """Assertions of what is not there yet: Gradio draws the components that an answer changes one after the other."""
    from playwright import sync_api  # of the extra `test`

    sync_api.expect.set_options(timeout=PATIENCE_MS)
    return sync_api.expect(locator)


def tabs(page: Page) -> list[str]:
    """The names of the page's tabs."""
    page.get_by_role("tab").first.wait_for()
    return page.get_by_role("tab").all_inner_texts()


def fill_new(field: Locator, text: str) -> None:
    """Types into a field that a tab or an accordion has just revealed.

    Gradio sets such a field to its first value once more, some frames after it appears: three, seen on an idle and on a
    busy machine. No person types that fast.
    """
    field.wait_for()
    field.page.evaluate("async () => { for (let i = 0; i < 10; i++) await new Promise(requestAnimationFrame); }")
    field.fill(text)


def send(page: Page, text: str = "") -> None:
    """Sends a message, with the files that are attached."""
    box = page.locator("#chat-box textarea")
    box.fill(text)
    page.get_by_test_id("submit-button").click()


def speak(page: Page, samples: np.ndarray) -> None:
    """Attaches a recording of what is said into the microphone of a page that `speaks`.

    Args:
        samples: float32 `[samples]` at `RATE`.
    """
    silence = np.zeros(RATE // 5, np.float32)  # What has been said reaches the recorder a little later.
    page.get_by_test_id("microphone-button").click()
    page.get_by_label("Start recording").click()
    page.wait_for_function("window.isRecorded")
    page.evaluate("samples => window.say(samples, true)", np.concatenate([samples, silence]).tolist())
    page.get_by_label("Stop recording").click()
    page.get_by_label("Attach audio").click()


def speech(client: OpenAI, text: str) -> np.ndarray:
    """A text in a voice of the shipped model, float32 `[samples]` at `RATE`."""
    answer = client.audio.speech.create(
        model="shapes", voice="ben", input=text, response_format="wav", extra_body={"stream": False}
    )
    samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert rate == RATE
    return samples


def draw_scene(file: Path, seed: int = 5) -> Scene:
    """Writes a picture that the shipped model has not seen, nor its description."""
    rng = random.Random(seed)
    scene = random_scene(rng, held_out=True)
    draw(rng, scene).save(file)
    return scene


def attach_to_call(page: Page, picture: Path) -> None:
    """Gives the model a picture to talk about, in the realtime tab."""
    page.get_by_role("button", name="Settings").click()
    page.locator("#realtime-picture input[type=file]").set_input_files(picture)
    page.locator("#realtime-picture img").wait_for()


def answers(page: Page) -> Locator:
    """The texts of the model, and of errors, in order."""
    return page.locator("#chat .bot .prose")


def wait_until_played(page: Page) -> np.ndarray:
    """Waits for the end of the sound that plays; returns all that was played, float32 `[samples]` at `RATE`."""
    page.wait_for_function("window.isHeard")
    page.locator("[id$=-player] audio").wait_for(state="detached")  # It has its place elsewhere.
    return played(page)


def stages_of_last_request(page: Page) -> list[str]:
    """The names that the tab of stages, which it opens, shows beside the bars of the last request."""
    page.get_by_role("tab", name="Stages").click()
    timeline = page.locator("#stages-timeline")
    timeline.locator(".track i").first.wait_for()
    return [name for name in timeline.locator(".row > :first-child").all_inner_texts() if name]


def played(page: Page) -> np.ndarray:
    """All sound that the page has played, without silence, float32 `[samples]` at `RATE`."""
    return np.concatenate([np.float32([]), *(np.float32(piece) for piece in page.evaluate("window.played"))])


def num_aborted(url: str, key: str = "none") -> float:
    """Requests that a server has aborted in its stages."""
    metrics = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"}, timeout=60).text
    lines = [line for line in metrics.splitlines() if line.startswith("vllm_omni:stage_aborted_total")]
    return sum(float(line.split()[-1]) for line in lines)


def wait_until_aborted(url: str, before: float, key: str = "none") -> None:
    """Waits until there is one more of them than before."""
    deadline = time.monotonic() + 120
    while num_aborted(url, key) == before:  # The metrics are those of the last snapshot.
        assert time.monotonic() < deadline, "the request goes on in the server"
        time.sleep(0.1)


@contextmanager
def playground(url: str, log: Path) -> Iterator[str]:
    """`vllm-omni playground URL`, in a process of its own; its address."""
    port = free_port()
    code = "from vllm_omni.entrypoints.cli.main import main; main()"
    address = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-c", code, "playground", url, f"--port={port}"]
    with running_program(command, lambda: answers_to(address), log):
        yield address
