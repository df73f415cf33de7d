# SPDX-License-Identifier: Apache-2.0
"""Spoken sentences, made once: what the model learns to say, and what it learns to hear."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.language import (
    describe,
    painting_prompt,
    random_dialogue,
    random_scene,
    random_sentence,
    say_request,
)
from training.speech import HEARD_VOICES, INPUT_RATE, SAMPLE_RATE, SPEAKERS, speak_all

NUM_SPOKEN = 3_000
"""Sentences that each speaker of the model says."""
NUM_HEARD, NUM_OF_QUESTION = 12_000, 6
"""Requests to repeat a sentence, and recordings of each question."""


@dataclass
class Recordings:
    """
    Attributes:
        labels: The voice, and the text, of each.
    """

    labels: list[tuple[str, str]]
    _samples: np.ndarray
    _ends: np.ndarray

    @classmethod
    def make(cls, jobs: Sequence[tuple], file: Path) -> "Recordings":
        """Reads `file`, or speaks the jobs (arguments of `speak`) and writes it."""
        if not file.exists():
            waves = []
            for start in range(0, len(jobs), 500):
                waves += [(wave * 32767).astype(np.int16) for wave in speak_all(jobs[start : start + 500])]
                print(f"{file.stem}: {len(waves)} of {len(jobs)} sentences are spoken", flush=True)
            labels = np.array([(voice, text) for text, voice, *_ in jobs])
            np.savez(file, labels=labels, samples=np.concatenate(waves), ends=np.cumsum([len(wave) for wave in waves]))
        loaded = np.load(file)
        labels = [(str(voice), str(text)) for voice, text in loaded["labels"]]
        return cls(labels, loaded["samples"], loaded["ends"])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> np.ndarray:
        """float32 `[samples]` in -1 to 1."""
        start = self._ends[index - 1] if index else 0
        return self._samples[start : self._ends[index]].astype(np.float32) / 32768


def spoken(folder: Path) -> Recordings:
    """Answers and sentences, by the model's speakers."""
    rng = random.Random("spoken")
    texts = []
    for _ in range(NUM_SPOKEN):
        scene = random_scene(rng)
        kinds = ("answer", "description", "sentence", "sentence")
        kind = rng.choice(kinds)
        if kind == "answer":
            texts.append(rng.choice(random_dialogue(rng, scene)).answer)
        else:
            texts.append(describe(scene) if kind == "description" else random_sentence(rng))
    jobs = [(text, voice, SAMPLE_RATE) for text in texts for voice in SPEAKERS.values()]
    return Recordings.make(jobs, folder / "spoken.npz")


def heard(folder: Path) -> Recordings:
    """Questions and requests, by many voices."""
    rng = random.Random("heard")
    questions = {turn.question for _ in range(60_000) for turn in random_dialogue(rng, random_scene(rng))}
    texts = [text for text in sorted(questions) for _ in range(NUM_OF_QUESTION)]
    for _ in range(NUM_HEARD):
        text = random_sentence(rng) if rng.random() < 0.8 else painting_prompt(rng, random_scene(rng))
        texts.append(say_request(rng, text).question)
    rng.shuffle(texts)
    jobs = [(t, rng.choice(HEARD_VOICES), INPUT_RATE, rng.uniform(0.85, 1.25), rng.uniform(0.85, 1.2)) for t in texts]
    return Recordings.make(jobs, folder / "heard.npz")
