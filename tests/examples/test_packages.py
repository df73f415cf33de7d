# SPDX-License-Identifier: Apache-2.0
"""The examples of authors' packages in a Python of their own: a recognizer understands what they say, and they read."""

import base64
import difflib
import io
import re
import subprocess
import sys
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import yaml
from PIL import Image, ImageDraw, ImageFont
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from tests.examples.running import EXAMPLES
from tests.playground import browser as web
from tests.playground.conftest import skip_without_browser
from tests.servers import RunningServer, import_path
from vllm_omni import OmniLLM
from vllm_omni.errors import InvalidRequestError
from vllm_omni_talk.speech_recognition import resample
from vllm_omni_talk.whisper import WhisperBase

FOLDER = EXAMPLES / "packages"
ENGLISH = "Water is made of hydrogen and oxygen."
JAPANESE = "今日はとても良い天気です。"
RATE = 16_000
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, WhisperBase.modules)), reason="the recognizer's packages are not installed"
)


@pytest.fixture(scope="module")
def recognize(tmp_path_factory: pytest.TempPathFactory) -> Callable[[np.ndarray, int, str], str]:
    """Writes the words of a sound, given with its rate and language."""
    folder = tmp_path_factory.mktemp("whisper")
    WhisperBase().convert(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder).float()
    processor = WhisperProcessor.from_pretrained(folder)

    def recognize(samples: np.ndarray, rate: int, language: str) -> str:
        sound = processor.feature_extractor(resample(samples, rate, RATE), sampling_rate=RATE, return_tensors="pt")
        start = f"<|startoftranscript|><|{language}|><|transcribe|><|notimestamps|>"
        written = processor.tokenizer(start, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            heard = model.model.encoder(sound.input_features)
            while written[0, -1] != model.config.eos_token_id and written.shape[1] < 160:
                token = model(encoder_outputs=heard, decoder_input_ids=written).logits[:, -1:].argmax(-1)
                written = torch.cat([written, token], dim=1)
        return processor.tokenizer.decode(written[0], skip_special_tokens=True)

    return recognize


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def opened(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], OmniLLM]]:
    """Opens an example; its environment is made in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("KOKORO_JA_CACHE", str(cache / "kokoro"))
    monkeypatch.syspath_prepend(str(FOLDER))
    llms: list[OmniLLM] = []

    def open_example(name: str) -> OmniLLM:
        llms.append(OmniLLM(name, str(FOLDER / f"{name}.yaml")))
        return llms[-1]

    yield open_example
    for llm in llms:
        llm.close()


def speak(llm: OmniLLM, text: str, **parameters: Any) -> tuple[np.ndarray, int]:
    prompt = {"stage": "tts", "prompt": text, "additional_information": parameters}
    (output,) = llm.generate([prompt], use_tqdm=False)
    return output.multimodal_output["audio"].numpy(), output.sample_rate


def likeness(heard: str, text: str) -> float:
    """From 0 to 1, of letters alone."""
    heard, text = (re.sub(r"\W", "", unicodedata.normalize("NFKC", each)).lower() for each in (heard, text))
    return difflib.SequenceMatcher(None, heard, text).ratio()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "language", "text", "least"),
    [
        ("piper_voice", "en", ENGLISH, 0.95),
        ("hibari_voice", "en", ENGLISH, 0.95),
        ("kokoro_voice", "ja", JAPANESE, 0.8),
    ],
)
def test_a_recognizer_understands_it(
    name: str, language: str, text: str, least: float, opened: Callable[[str], OmniLLM], recognize: Any
) -> None:
    llm = opened(name)
    samples, rate = speak(llm, text)
    heard = recognize(samples, rate, language)
    assert likeness(heard, text) >= least, heard
    if name != "hibari_voice":
        assert len(speak(llm, text, speed=2.0)[0]) < 0.75 * len(samples)


def draw_page(*columns: list[str]) -> bytes:
    """A PNG file of black text on white."""
    image = Image.new("RGB", (1000 * len(columns), 60 + 80 * max(map(len, columns))), "white")
    draw = ImageDraw.Draw(image)
    for column, lines in enumerate(columns):
        for place, line in enumerate(lines):
            draw.text((40 + 1000 * column, 40 + 80 * place), line, "black", ImageFont.load_default(48))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
def test_a_page_is_read(opened: Callable[[str], OmniLLM]) -> None:
    lines = ["Water is made of hydrogen", "and oxygen. It boils at", "100 degrees Celsius."]
    llm = opened("page_text")
    prompt = {"prompt": "", "additional_information": {"picture": draw_page(lines)}}
    (output,) = llm.generate([prompt], use_tqdm=False)
    assert output.outputs[0].text.split() == " ".join(lines).split()
    with pytest.raises(InvalidRequestError, match="give the bytes of a file"):
        llm.generate("nothing", use_tqdm=False)


@pytest.fixture(scope="module")
def reading_server(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[RunningServer]:
    """`read_aloud`, with the playground where Gradio is installed."""
    configuration = FOLDER / "read_aloud/read_aloud.yaml"
    flags = [f"--stage-configs-path={configuration}", *(["--playground"] if find_spec("gradio") else [])]
    env = {"PYTHONPATH": import_path(FOLDER), "XDG_CACHE_HOME": str(cache)}
    server = RunningServer("read_aloud", *flags, log=tmp_path_factory.mktemp("server") / "log.txt", env=env)
    yield server
    server.stop()


PAGE_RATE = 22_050
COLUMNS = (
    ["Water is made of hydrogen and", "oxygen. It boils at one hundred de-", "grees. It is clear."],
    ["Ice is lighter than water, and", "it swims. People have walked", "on it in the winter."],
)
DRAWN = """Water is made of hydrogen and oxygen. It boils at one hundred degrees. It is clear.

Ice is lighter than water, and it swims. People have walked on it in the winter.

"""


def ask(server: RunningServer, page: bytes) -> tuple[str, np.ndarray]:
    """The text and the speech of a picture, streamed by a chat."""
    url = f"data:image/png;base64,{base64.b64encode(page).decode()}"
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    chunks = server.openai().chat.completions.create(
        model="read_aloud",
        messages=messages,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        stream=True,
    )
    text, sound = "", b""
    for chunk in chunks:
        delta: Any = chunk.choices[0].delta
        text += delta.content or ""
        sound += base64.b64decode((delta.audio and delta.audio.data) or "")
    return text, np.frombuffer(sound, "<i2") / np.float32(32768)


@pytest.mark.slow
def test_a_drawn_page_is_read_aloud(reading_server: RunningServer, recognize: Any) -> None:
    text, speech = ask(reading_server, draw_page(*COLUMNS))
    assert text == DRAWN
    heard = recognize(speech, PAGE_RATE, "en")
    assert likeness(heard, text) >= 0.9, heard
    with pytest.raises(openai.BadRequestError, match="the picture has no text"):
        ask(reading_server, draw_page([""]))


@pytest.mark.slow
def test_a_photograph_is_read_aloud(reading_server: RunningServer, tmp_path: Path) -> None:
    """The photograph of a page that scikit-image brings."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "scikit-image==0.26.0"]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        text, speech = ask(reading_server, files.read("skimage/data/page.png"))
    words = """Region-based segmentation Let us first determine markers of the coins and the background. These markers
        are pixels that we can label unambiguously as either object or background. Here, the markers are found at the
        two extreme parts of the histogram of grey values:"""
    paragraph, code, _ = text.split("\n\n")
    assert paragraph.split() == words.split() and code.startswith(">>")
    assert len(speech) > 10 * PAGE_RATE


@pytest.mark.slow
def test_a_page_is_read_aloud_in_the_playground(reading_server: RunningServer, recognize: Any, tmp_path: Path) -> None:
    skip_without_browser()
    from playwright.sync_api import sync_playwright

    page_file = tmp_path / "page.png"
    page_file.write_bytes(draw_page(["Water is made of hydrogen", "and oxygen."]))  # Speech is played in its time.
    with sync_playwright() as playwright:
        browser = web.launch(playwright)
        page = web.open_page(browser, f"{reading_server.url}/playground")
        page.locator("#chat-box input[type=file]").set_input_files(page_file)
        page.locator("#chat-box .thumbnail-item").wait_for()
        web.send(page)
        played = web.wait_until_played(page)
        written = web.answers(page).last.inner_text()
        browser.close()
    assert written.split() == ENGLISH.split()
    heard = recognize(played, web.RATE, "en")
    assert likeness(heard, ENGLISH) >= 0.9, heard


@pytest.mark.parametrize("path", sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*/*.py")]), ids=lambda path: path.stem)
def test_an_example_is_short_and_pinned(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    name = path.stem if path.parent == FOLDER else path.parent.name
    first, *others = yaml.safe_load((path.parent / f"{name}.yaml").read_text())["stage_args"]
    assert first["function"].startswith(".".join([*path.parent.relative_to(FOLDER).parts, path.stem, ""]))
    for stage in (first, *others):
        assert all(re.fullmatch(r"[\w-]+==[\w.]+", package) for package in stage["runtime"]["packages"])
