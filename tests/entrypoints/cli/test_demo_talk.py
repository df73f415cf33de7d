# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni demo`'s judge of speech passes the right speech, whatever its words are, and no other."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from vllm_omni.config import utils
from vllm_omni.entrypoints.cli import demo, demo_talk
from vllm_omni.entrypoints.cli.demo_results import DemoResult
from vllm_omni.model_packages import InstalledModels
from vllm_omni.talk import packages

ROOT = Path(__file__).parents[3]
PARIS = "The capital of France is Paris."
ANSWERS = [
    PARIS,
    "Hello!",
    "2 + 3 = 5",
    "It began in 1984, and ended in 1991.",
    "**Photosynthesis** converts carbon dioxide to glucose; Qwzx is a name that no dictionary has.",
    "I'm sorry for any confusion. I'll be happy to help you find the best deals on Joe's products! 🍋",
]


@pytest.fixture(scope="module")
def spoken() -> dict[str, np.ndarray]:
    """The answers in the voice of `talk`, 24 kHz."""
    pytest.importorskip("pocketsphinx", reason="the extra talk is not installed")
    hibari = pytest.importorskip("hibari", reason="the extra talk is not installed")
    voice = hibari.Hibari("heart")
    return {text: np.concatenate(list(voice.stream(demo_talk.speakable(text)))) for text in ANSWERS}


def test_right_speech(spoken: dict[str, np.ndarray]) -> None:
    for text, speech in spoken.items():
        is_right, note = demo_talk.judge_speech(text, speech)
        assert is_right, (text, note)
    assert demo_talk.judge_speech(PARIS, spoken[PARIS], "paris") == (True, "6 of 6 words recognized by PocketSphinx")


@pytest.mark.parametrize("text", [PARIS, "Hello!", ANSWERS[-2]])
def test_wrong_speech(spoken: dict[str, np.ndarray], text: str) -> None:
    speech = spoken[text]
    noise = np.random.default_rng(0).standard_normal(len(speech)).astype(np.float32) / 10
    assert demo_talk.judge_speech(text, np.zeros_like(speech)) == (False, "silence")
    assert demo_talk.judge_speech(text, speech[:0]) == (False, "silence")
    for garbled in (noise, speech[::-1], speech[::3], speech * noise):
        is_right, note = demo_talk.judge_speech(text, garbled)
        assert not is_right, note


def test_another_sentence_is_wrong(spoken: dict[str, np.ndarray]) -> None:
    for text, other in ((PARIS, ANSWERS[-1]), (ANSWERS[-1], PARIS), ("Hello!", PARIS)):
        is_right, note = demo_talk.judge_speech(text, spoken[other])
        assert not is_right, note


def test_the_required_word_must_be_heard(spoken: dict[str, np.ndarray]) -> None:
    is_right, note = demo_talk.judge_speech(f"{PARIS} London.", spoken[PARIS], "london")
    assert not is_right and note.endswith("words recognized by PocketSphinx, but not london")


def test_text_without_words_is_not_judged() -> None:
    assert demo_talk.judge_speech("```\nx = 1\n```", np.zeros(0)) == (
        True,
        "not judged: the text has nothing to speak",
    )


def test_without_its_packages_talk_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "_MODULES", {"no_such_module": "no-such-package"})
    assert demo_talk.answer_sentence("Hello!", tmp_path) == []
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert "left out: talk needs packages that are not installed (no-such-package): pip install" in line


@pytest.mark.parametrize(("arguments", "asked"), [(["--say", "Hi!"], "Hi!"), (["--say", ""], demo.QUESTION)])
def test_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], asked: str) -> None:
    sentences: list[str] = []
    monkeypatch.setattr(demo, "answer_sentence", lambda sentence, folder: sentences.append(sentence) or [])
    monkeypatch.setattr(demo, "_run_shapes", lambda folder, seed: list[DemoResult]())
    with pytest.raises(SystemExit):
        demo.run_demo([str(tmp_path), *arguments])
    assert sentences == [asked]


def test_without_any_of_its_packages_the_demo_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "_MODULES", {"no_such_module": "no-such-package"})
    monkeypatch.setattr(utils, "find_models", lambda: InstalledModels({}, {}))
    with pytest.raises(SystemExit, match="nothing was run"):
        demo.run_demo([str(tmp_path)])
    assert "[2/6] left out: no installed package has the checkpoint 'shapes'; in a checkout" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("sentence", ["", """What's "$5" `or` $(HOME) \\ %s; # é?""", "-h", "$(", "two\nlines"])
@pytest.mark.parametrize("from_environment", [False, True])
def test_make_passes_any_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str, from_environment: bool
) -> None:
    script, seen = tmp_path / "vllm-omni", tmp_path / "seen"
    script.write_text(f'#!/bin/sh\nprintf "%s" "$*" >{seen}\n')
    script.chmod(0o755)
    command = ["make", "-C", str(ROOT), "-o", ".venv/.ready-cpu", f"BIN={tmp_path}", "demo"]
    if from_environment:
        monkeypatch.setenv("SAY", sentence)
    else:
        command.append(f"SAY={sentence}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert seen.read_text() == f"demo --say={sentence}"
