# SPDX-License-Identifier: Apache-2.0
"""A recognizer with a language model or grammar of the closed language. Needs the package `pocketsphinx`."""

import importlib.util
import random

import numpy as np

from coloured_shapes.language import (
    COLOURS,
    KINDS,
    PLACES,
    SPOKEN_WORDS,
    article,
    random_dialogue,
    random_scene,
    random_sentence,
    split_words,
)
from vllm_omni_talk.speech_recognition import make_arpa, make_decoder, make_dictionary, recognize, to_input

_NUM_SENTENCES = 20_000
_VOCABULARY = sorted({word.lower() for word in SPOKEN_WORDS})


_DESCRIPTIONS = f"""#JSGF V1.0;
grammar descriptions;
public <description> = <name> ({" | ".join(PLACES)}) | <name> is (left of | right of | above | below) <name>
  | <name> <name> and <name>;
<name> = ({" | ".join(map(article, COLOURS))}) ({" | ".join(KINDS)});
"""


class Recognizer:
    """Words of a recording. Knows the vocabulary and how often words follow each other, nothing of any model."""

    def __init__(self, only_descriptions: bool = False) -> None:
        """`only_descriptions`: by a grammar of what `describe` makes; else a trigram model of all sentences."""
        grammar = {"jsgf": _DESCRIPTIONS} if only_descriptions else {"lm": _make_language_model()}
        self._decoder = make_decoder(dict=make_dictionary(_VOCABULARY), **grammar)

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("pocketsphinx") is not None

    def words(self, samples: np.ndarray, rate: int) -> list[str]:
        """`samples`: float32 `[samples]`, `rate` of them for each second."""
        return recognize(self._decoder, to_input(samples, rate)).split()


def _make_language_model() -> str:
    rng = random.Random(0)
    sentences = [split_words(random_sentence(rng)) for _ in range(_NUM_SENTENCES)]
    for _ in range(_NUM_SENTENCES // 2):
        turn = random_dialogue(rng, random_scene(rng))[0]
        sentences += [split_words(turn.question), split_words(turn.answer)]
    return make_arpa(sentences, _VOCABULARY)
