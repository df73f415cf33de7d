# SPDX-License-Identifier: Apache-2.0
"""What the clients ask for, and whether what they got is that: recognizers judge speech and paintings."""

import base64
import functools
import io
import random
from dataclasses import dataclass
from pathlib import Path

import soundfile
from PIL import Image

from coloured_shapes.checker import agrees, find_shapes
from coloured_shapes.language import random_scene, split_words
from coloured_shapes.pictures import draw
from coloured_shapes.recognizer import Recognizer
from coloured_shapes.speech import SAMPLE_RATE
from tests.coloured_shapes.recordings import recording
from vllm_omni_talk.speech_recognition import count_understood

SENTENCE = "A red circle is left of a blue square."
"""Is spoken, and painted."""


@dataclass(frozen=True)
class Question:
    """A picture (PNG) with questions about it, written and spoken (WAV)."""

    picture: Path
    sound: Path
    text: str = "Which colour has the star?"
    answer: str = "The star is yellow."
    answer_to_sound: str = "There are three shapes."


def write_question(folder: Path) -> Question:
    """Writes the files into a folder."""
    question = Question(folder / "picture.png", folder / "question.wav")
    rng = random.Random(7)  # a yellow star, a red square and a purple circle
    draw(rng, random_scene(rng, held_out=True)).save(question.picture)
    soundfile.write(question.sound, recording("how many shapes are there"), SAMPLE_RATE)
    return question


def says(file: str | bytes, text: str) -> bool:
    """Whether a sound file (base64 or bytes) says a text. A quarter of its words may be misunderstood."""
    samples, rate = soundfile.read(io.BytesIO(_decoded(file)), dtype="float32")
    words = split_words(text)
    return count_understood(words, _recognizer().words(samples, rate)) / len(words) >= 0.75


def shows(file: str | bytes, prompt: str) -> bool:
    """Whether an image file (base64 or bytes) shows what a prompt says."""
    return agrees(find_shapes(Image.open(io.BytesIO(_decoded(file)))), prompt)


@functools.cache
def _recognizer() -> Recognizer:
    """Making one takes seconds."""
    return Recognizer()


def _decoded(file: str | bytes) -> bytes:
    return base64.b64decode(file) if isinstance(file, str) else file
