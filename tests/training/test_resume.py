# SPDX-License-Identifier: Apache-2.0
"""A training that is interrupted and resumed has the weights and the log of one that is not."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from coloured_shapes.speech import FRAME
from training import loop, talker, thinker
from training.__main__ import Trainer
from training.codec import NUM_CODES, NUM_GROUPS
from training.data import Utterance
from training.loop import Training
from training.tokenizer import encode

pytestmark = pytest.mark.slow


class Interrupted(Exception):
    pass


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 4)
    monkeypatch.setattr(loop, "LOG_EVERY", 3)


def interrupted(train: Callable[[Path], None], folder: Path, name: str, step: int) -> None:
    """Trains until `step` of the training `name`, and then, as a new process does, from its last checkpoint on."""

    def write_log(self: Training, figures: dict[str, float]) -> None:
        original(self, figures)
        if self._name == name and self._step == step:
            raise Interrupted

    original = Training._write_log
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Training, "_write_log", write_log)
        train(folder)
    torch.manual_seed(99)
    train(folder)


def check_equal(folder: Path, other: Path, name: str) -> None:
    """Whether the last checkpoints and the logs of two runs of a training are equal, but for the time."""
    states = [torch.load(each / f"{name}.pt") for each in (folder, other)]
    for state in states:
        del state["seconds"], state["log_size"]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    lines = [re.sub(r"\(\d+ s\)", "", (each / f"{name}.log").read_text()) for each in (folder, other)]
    assert lines[0] == lines[1] and lines[0].count("\n") > 1


def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "resumed"


@pytest.mark.parametrize("step", [1, 4, 7])
def test_weights_optimizer_and_log(tmp_path: Path, step: int) -> None:
    """Also with dropout, whose random numbers are torch's own."""

    def train(folder: Path) -> None:
        def compute(rng: random.Random) -> tuple[torch.Tensor, dict[str, float]]:
            loss = (model(torch.tensor([[rng.random()] * 4] * 8)) - 1).square().mean()
            return loss, {"loss": loss.item()}

        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        Training(folder, "model", [model], steps=10, rate=1.0).run(compute)

    whole, resumed = folders(tmp_path)
    train(whole)
    interrupted(train, resumed, "model", step)
    check_equal(whole, resumed, "model")


def test_thinker(tmp_path: Path) -> None:
    """It is interrupted in the second stage, whose model has been trained by the first."""

    def train(folder: Path) -> None:
        trainer = Trainer(folder).make_thinker_trainer()
        thinker.train_vision_alignment(folder, trainer, steps=2, batch=2)
        thinker.train_text_sft(folder, trainer, steps=6, batch=2)

    whole, resumed = folders(tmp_path)
    train(whole)
    interrupted(train, resumed, "text_sft", step=2)
    check_equal(whole, resumed, "text_sft")


def test_talker(tmp_path: Path) -> None:
    def train(folder: Path) -> None:
        def sample(rng: random.Random) -> talker.SpeechExample:
            tokens = encode(trainer.tokenizer, "a red circle.")
            alignment = [-1, *(index for index in range(len(tokens)) for _ in range(2)), len(tokens)]
            codes = torch.tensor([rng.choices(range(NUM_CODES), k=NUM_GROUPS) for _ in alignment])
            audio = np.zeros(len(alignment) * FRAME, np.float32)
            return talker.SpeechExample("Ada", tokens, Utterance(audio, codes, alignment))

        trainer = Trainer(folder)
        talker.train(folder, trainer.make_talker_trainer(), sample, steps=6, batch=2)

    whole, resumed = folders(tmp_path)
    train(whole)
    interrupted(train, resumed, "talker", step=5)
    check_equal(whole, resumed, "talker")
