# SPDX-License-Identifier: Apache-2.0
"""The step of `vllm-omni demo` that `talk` has: the sentence, the judge of speech, and verdicts."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

import vllm_omni_talk
from vllm_omni.config import utils
from vllm_omni.entrypoints.cli import demo as command
from vllm_omni.entrypoints.cli.demo import run_demo
from vllm_omni.entrypoints.cli.demo_results import DemoAnswer, DemoRun, Verdict
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.model_packages import InstalledModels
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni_talk import demo, packages

STAGE = StageMetrics(stage_id=0, name="llm", arrival=10.0, first_output=10.5, finished=12.0)
OUTPUT = cast(OmniRequestOutput, SimpleNamespace(stage_metrics=[STAGE]))
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
    return {text: np.concatenate(list(voice.stream(demo.speakable(text)))) for text in ANSWERS}


def test_right_speech(spoken: dict[str, np.ndarray]) -> None:
    for text, speech in spoken.items():
        is_right, note = demo.judge_speech(text, speech)
        assert is_right, (text, note)
    assert demo.judge_speech(PARIS, spoken[PARIS], "paris") == (True, "6 of 6 words recognized by PocketSphinx")


@pytest.mark.parametrize("text", [PARIS, "Hello!", ANSWERS[-2]])
def test_wrong_speech(spoken: dict[str, np.ndarray], text: str) -> None:
    speech = spoken[text]
    noise = np.random.default_rng(0).standard_normal(len(speech)).astype(np.float32) / 10
    assert demo.judge_speech(text, np.zeros_like(speech)) == (False, "silence")
    assert demo.judge_speech(text, speech[:0]) == (False, "silence")
    for garbled in (noise, speech[::-1], speech[::3], speech * noise):
        is_right, note = demo.judge_speech(text, garbled)
        assert not is_right, note


def test_another_sentence_is_wrong(spoken: dict[str, np.ndarray]) -> None:
    for text, other in ((PARIS, ANSWERS[-1]), (ANSWERS[-1], PARIS), ("Hello!", PARIS)):
        is_right, note = demo.judge_speech(text, spoken[other])
        assert not is_right, note


def test_the_required_word_must_be_heard(spoken: dict[str, np.ndarray]) -> None:
    is_right, note = demo.judge_speech(f"{PARIS} London.", spoken[PARIS], "london")
    assert not is_right and note.endswith("words recognized by PocketSphinx, but not london")


def test_text_without_words_is_not_judged() -> None:
    assert demo.judge_speech("```\nx = 1\n```", np.zeros(0)) == (
        True,
        "not judged: the text has nothing to speak",
    )


def only_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other package is installed."""
    models = InstalledModels({"vllm-omni (talk)": vllm_omni_talk.MODELS}, {})
    for module in (utils, command):
        monkeypatch.setattr(module, "find_models", lambda: models)


@pytest.mark.parametrize(
    ("sentence", "text", "is_cut", "is_clear", "verdict"),
    [
        (demo.QUESTION, PARIS, False, True, "right"),
        (demo.QUESTION, PARIS, True, True, "cut short"),
        (demo.QUESTION, "It is London.", False, True, "wrong"),
        (demo.QUESTION, "It is London", True, True, "wrong"),
        (demo.QUESTION, PARIS, False, False, "wrong"),
        ("Why?", "Because.", False, True, "not judged"),
        ("Why?", "Because", True, True, "cut short"),
        ("Why?", "Because.", False, False, "wrong"),
    ],
)
def test_an_answer_is_right_only_if_it_is_whole_and_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sentence: str,
    text: str,
    is_cut: bool,
    is_clear: bool,
    verdict: Verdict,
) -> None:
    answer = DemoAnswer(text, torch.zeros(2400), 0.1, 0.2, is_cut, OUTPUT)
    monkeypatch.setattr(demo, "require_packages", lambda: None)
    monkeypatch.setattr(demo, "OmniLLM", lambda *args, **options: nullcontext())
    monkeypatch.setattr(demo, "stream_answer", lambda omni, sentence: answer)
    monkeypatch.setattr(demo, "judge_speech", lambda *args: (is_clear, "judged"))
    only_talk(monkeypatch)

    with pytest.raises(SystemExit) as ended:
        run_demo([str(tmp_path), "--say", sentence])

    assert ended.value.code == (1 if verdict == "wrong" else 0)
    printed = capsys.readouterr().out
    assert f"\n1 {verdict}; see {tmp_path}/index.html" in printed
    page = (tmp_path / "index.html").read_text()
    style = verdict if verdict in ("right", "wrong") else "open"
    assert re.findall(r"<h2>The answer to .*: <span class=(\w+)>(.*)</span>", page) == [(style, verdict)]


def test_without_its_packages_talk_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "_MODULES", {"no_such_module": "no-such-package"})
    run = DemoRun("Hello!", tmp_path, seed=0, num_steps=1)
    demo.answer_sentence(run)
    assert run.results == []
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert "left out: talk needs packages that are not installed (no-such-package): pip install" in line


@pytest.mark.parametrize(("arguments", "asked"), [(["--say", "Hi!"], "Hi!"), (["--say", ""], demo.QUESTION)])
def test_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], asked: str) -> None:
    sentences: list[str] = []
    monkeypatch.setattr(demo, "answer_sentence", lambda run: sentences.append(run.sentence))
    only_talk(monkeypatch)
    with pytest.raises(SystemExit):
        run_demo([str(tmp_path), *arguments])
    assert sentences == [asked]


def test_without_any_of_its_packages_the_demo_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "_MODULES", {"no_such_module": "no-such-package"})
    only_talk(monkeypatch)
    with pytest.raises(SystemExit, match="nothing was run"):
        run_demo([str(tmp_path)])
    out = capsys.readouterr().out
    assert out.startswith("[1/1] starting talk")
    assert "\nleft out: no installed package has the checkpoint 'shapes'; in a checkout" in out
    assert not list(tmp_path.iterdir())
