# SPDX-License-Identifier: Apache-2.0
"""The examples of authors' packages in a Python of their own: a recognizer understands what they say, and they read."""

import difflib
import io
import re
import unicodedata
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageDraw, ImageFont
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from tests.examples.running import EXAMPLES
from vllm_omni import OmniLLM
from vllm_omni.errors import InvalidRequestError
from vllm_omni.speech_recognition import resample
from vllm_omni.talk.whisper import WhisperBase

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
            while written[0, -1] != model.config.eos_token_id and written.shape[1] < 48:
                token = model(sound.input_features, decoder_input_ids=written).logits[:, -1:].argmax(-1)
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


def draw_page(lines: list[str]) -> bytes:
    """A PNG file of black text on white."""
    image = Image.new("RGB", (1000, 60 + 80 * len(lines)), "white")
    draw = ImageDraw.Draw(image)
    for place, line in enumerate(lines):
        draw.text((40, 40 + 80 * place), line, "black", ImageFont.load_default(48))
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


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_pinned(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    (stage,) = yaml.safe_load(path.with_suffix(".yaml").read_text())["stage_args"]
    assert stage["function"].startswith(f"{path.stem}.")
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", package) for package in stage["runtime"]["packages"])
