# SPDX-License-Identifier: Apache-2.0
"""Speech that is synthesized once: recordings for the thinker, and the words of the talker's utterances."""

import functools
import random
import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from coloured_shapes.language import (
    NO_PICTURE,
    REFUSAL,
    WORDS,
    describe,
    is_held_out,
    painting_prompt,
    random_dialogue,
    random_scene,
    random_sentence,
    say_request,
    sentence,
)
from coloured_shapes.speech import FRAME, HEARD_VOICES, INPUT_RATE, SPEAKERS, speak_all, speak_word
from training.codec import Quantizer
from training.tokenizer import SPACE
from vllm_omni_talk.speech_recognition import resample

NUM_COPY_REQUESTS, NUM_OF_QUESTION = 12_000, 6
"""Requests to repeat a sentence, and recordings of each question."""


@dataclass
class Recordings:
    """Recordings in one file.

    Attributes:
        labels: The voice, and the text, of each.
    """

    labels: list[tuple[str, str]]
    _samples: np.ndarray
    _ends: np.ndarray

    @classmethod
    def make(cls, jobs: Sequence[tuple], file: Path) -> "Recordings":
        """Reads `file`, or synthesizes the jobs (arguments of `speak`) and writes it."""
        if not file.exists():
            audio: list[np.ndarray] = []
            for start in range(0, len(jobs), 500):
                audio += [(clip * 32767).astype(np.int16) for clip in speak_all(jobs[start : start + 500])]
                print(f"{file.stem}: {len(audio)} of {len(jobs)} sentences are synthesized", flush=True)
            labelled = np.array([(voice, text) for text, voice, *_ in jobs])
            ends = np.cumsum([len(clip) for clip in audio])
            np.savez(file, labels=labelled, samples=np.concatenate(audio), ends=ends)
        loaded = np.load(file)
        labels = [(str(voice), str(text)) for voice, text in loaded["labels"]]
        return cls(labels, loaded["samples"], loaded["ends"])

    def __getitem__(self, index: int) -> np.ndarray:
        """float32 `[samples]` in -1 to 1."""
        start = self._ends[index - 1] if index else 0
        return self._samples[start : self._ends[index]].astype(np.float32) / 32768


class Speakers:
    """The model's speakers: utterances are put together of recordings of every word of the language.

    A word lasts whole frames, so that it has the same codes in every sentence. Text that is not of the language is
    spelled.

    Attributes:
        audio: By sound and voice of flite, float32 `[frames * 1920]`.
    """

    def __init__(self, folder: Path, quantizer: Quantizer | None = None) -> None:
        file = folder / "words.npz"
        sounds = sorted({*(_SOUNDS.get(word, word) for word in _spoken_words()), *LETTERS.values()})
        keys = [(sound, voice) for sound in sounds for voice in SPEAKERS.values()]
        if not file.exists():
            with ThreadPoolExecutor(2) as pool:
                words = list(pool.map(lambda key: speak_word(*key), keys))
            np.savez(file, samples=np.concatenate(words), ends=np.cumsum([len(word) for word in words]))
        loaded = np.load(file)
        self.audio = dict(zip(keys, np.split(loaded["samples"], loaded["ends"][:-1]), strict=True))
        self._silence = np.zeros(FRAME, np.float32)
        if quantizer is not None:
            self._codes = {key: quantizer.encode(word) for key, word in self.audio.items()}
            self._silent = quantizer.encode(self._silence)

    def synthesize(self, tokens: Sequence[str], voice: str) -> "Utterance":
        """
        Args:
            tokens: As the vocabulary writes them: words with or without a space before, punctuation, bytes.
            voice: Of flite.
        """
        audio, codes, alignment = [self._silence], [self._silent], [-1]
        for index, token in enumerate(tokens):
            sound = sound_of(token)
            if sound == PAUSE:
                audio += [self._silence] * 2
                codes += [self._silent] * 2
                alignment += [index] * 2
            elif sound is not None:
                audio.append(self.audio[sound, voice])
                codes.append(self._codes[sound, voice])
                alignment += [index] * len(codes[-1])
        if alignment[-1] < 0 or sound_of(tokens[alignment[-1]]) != PAUSE:
            audio += [self._silence] * 2
            codes += [self._silent] * 2
            alignment += [len(tokens)] * 2
        return Utterance(np.concatenate(audio), torch.cat(codes), alignment)


@dataclass
class Utterance:
    """Text as audio and as codes.

    Attributes:
        audio: float32 `[frames * 1920]`, at 24 kHz.
        codes: int64 `[frames, groups]`.
        alignment: For each frame the index of its token; -1 before the first, their number after the last.
    """

    audio: np.ndarray
    codes: torch.Tensor
    alignment: list[int]


PAUSE = ""
LETTERS = {letter: letter for letter in string.ascii_lowercase} | dict(
    zip(string.digits, ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], strict=True)
)
_SOUNDS = {"a": "uh"}
"""How a word is written for flite: an article is not a letter."""


def sound_of(token: str) -> str | None:
    """The sound of a token: a word, a letter's name or a pause; None for no sound."""
    word = token.replace(SPACE, "").lower()
    if word in (".", ",", "?", "!", ":", ";"):
        return PAUSE
    if (len(token) == 1 and word in LETTERS and token.islower()) or word.isdigit():
        return LETTERS.get(word)
    return _SOUNDS.get(word, word) if word in _spoken_words() else None


@functools.cache
def _spoken_words() -> frozenset[str]:
    return frozenset(word.lower() for word in WORDS)


def random_text(rng: random.Random) -> str:
    """Text for the talker: answers, descriptions, sentences, and a few words that it does not know."""
    scene = random_scene(rng)
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(random_dialogue(rng, scene)).answer
    if kind < 0.3:
        return describe(scene)
    if kind < 0.34:
        return rng.choice((REFUSAL, NO_PICTURE))
    words = (random_words(rng) if rng.random() < 0.4 else random_sentence(rng)).split()
    if kind < 0.4:
        words.insert(rng.randrange(len(words)), "".join(rng.choices(list(LETTERS), k=rng.randint(1, 4))))
    if kind < 0.6:
        words.insert(rng.randrange(len(words)), rng.choice(words[:-1]) if len(words) > 1 else "the")
    if kind > 0.9:
        words.insert(rng.randint(1, len(words)), rng.choice((",", ":")))
    return " ".join(words).replace(" ,", ",").replace(" :", ":")


def random_words(rng: random.Random) -> str:
    """Words in random order, so that none is predicted from those before it."""
    while True:
        text = " ".join(rng.choices(WORDS, k=rng.randint(3, 8)))
        if not is_held_out(text):
            return sentence(text)


def vary(rng: random.Random, samples: np.ndarray) -> np.ndarray:
    """Changes the speed, pitch and timbre of a recording at `INPUT_RATE`: the model does not overfit to its voice."""
    samples = resample(samples, INPUT_RATE, round(INPUT_RATE * rng.uniform(0.92, 1.08)))
    spectrum = np.fft.rfft(samples)
    hertz = np.linspace(0, INPUT_RATE / 2, len(spectrum))
    decibels = np.interp(hertz, [0, 300, 700, 1500, 3000, 5000, 8000], [rng.uniform(-6, 6) for _ in range(7)])
    if rng.random() < 0.3:  # as with few samples a second
        decibels[hertz > rng.uniform(3000, 7000)] = -40
    return np.fft.irfft(spectrum * 10 ** (decibels / 20), len(samples)).astype(np.float32)


def record_requests(folder: Path) -> Recordings:
    """Recordings of questions and of requests to repeat a text, by many voices."""
    rng = random.Random("heard")
    questions = {turn.question for _ in range(60_000) for turn in random_dialogue(rng, random_scene(rng))}
    texts = [text for text in sorted(questions) for _ in range(NUM_OF_QUESTION)]
    for _ in range(NUM_COPY_REQUESTS):
        text = random_sentence(rng) if rng.random() < 0.8 else painting_prompt(rng, random_scene(rng))
        texts.append(say_request(rng, text).question)
    rng.shuffle(texts)
    jobs = [(t, rng.choice(HEARD_VOICES), INPUT_RATE, rng.uniform(0.85, 1.25), rng.uniform(0.85, 1.2)) for t in texts]
    return Recordings.make(jobs, folder / "requests.npz")
