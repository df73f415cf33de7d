# SPDX-License-Identifier: Apache-2.0
"""PocketSphinx with its own acoustic model and dictionary, and a language model or grammar of the closed language.

Needs the package `pocketsphinx` (extra `recognizer`), which brings the acoustic model.
"""

import importlib.util
import math
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from vllm_omni.shapes.language import (
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
from vllm_omni.shapes.speech import INPUT_RATE, resample

_DISCOUNT = 0.5
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
        import pocketsphinx

        with tempfile.TemporaryDirectory() as folder:
            file, dictionary = Path(folder, "model"), Path(folder, "dictionary")
            file.write_text(_DESCRIPTIONS if only_descriptions else _make_language_model())
            dictionary.write_text(make_dictionary(_VOCABULARY))
            kind = "jsgf" if only_descriptions else "lm"
            files = {kind: str(file), "dict": str(dictionary)}
            self._decoder = pocketsphinx.Decoder(samprate=INPUT_RATE, loglevel="FATAL", **files)

    @staticmethod
    def is_installed() -> bool:
        return importlib.util.find_spec("pocketsphinx") is not None

    def words(self, samples: np.ndarray, rate: int) -> list[str]:
        """`samples`: float32 `[samples]`, `rate` of them for each second."""
        samples = resample(samples, rate, INPUT_RATE)
        self._decoder.start_utt()
        self._decoder.process_raw((samples.clip(-1, 1) * 32767).astype(np.int16).tobytes(), full_utt=True)
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return hypothesis.hypstr.split() if hypothesis else []


def count_understood(expected: Sequence[str], heard: Sequence[str]) -> int:
    """Words of `expected` that were heard, in order."""
    blocks = SequenceMatcher(None, expected, heard, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks)


def _make_language_model() -> str:
    rng = random.Random(0)
    sentences = [split_words(random_sentence(rng)) for _ in range(_NUM_SENTENCES)]
    for _ in range(_NUM_SENTENCES // 2):
        turn = random_dialogue(rng, random_scene(rng))[0]
        sentences += [split_words(turn.question), split_words(turn.answer)]
    return make_arpa(sentences, _VOCABULARY)


def make_dictionary(words: Iterable[str]) -> str:
    """The pronunciations that PocketSphinx has for `words`: none for unknown ones.

    With its whole dictionary of 130,000 words a language model takes 10 s to load.
    """
    import pocketsphinx

    decoder = pocketsphinx.Decoder(samprate=INPUT_RATE, loglevel="FATAL", lm=None)
    lines = []
    for word in words:
        names = (word, *(f"{word}({number})" for number in range(2, 10)))
        lines += [f"{name} {sounds}\n" for name in names if (sounds := decoder.lookup_word(name))]
    return "".join(lines)


def make_arpa(sentences: Iterable[Sequence[str]], vocabulary: Sequence[str]) -> str:
    """A trigram model with absolute discounting, in the format of ARPA."""
    counts: list[Counter[tuple[str, ...]]] = [Counter(), Counter(), Counter()]
    for sentence in sentences:
        words = ("<s>", *sentence, "</s>")
        for order in (1, 2, 3):
            counts[order - 1].update(words[i : i + order] for i in range(len(words) - order + 1))
    total = sum(count for gram, count in counts[0].items() if gram != ("<s>",)) + len(vocabulary)
    unigrams: dict[tuple[str, ...], float] = {}
    for word in (*vocabulary, "</s>"):
        unigrams[(word,)] = (counts[0][(word,)] + 1) / total
    probabilities: list[dict[tuple[str, ...], float]] = [unigrams, {}, {}]
    backoffs: dict[tuple[str, ...], float] = {}
    for order in (2, 3):
        by_context: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
        for gram, count in counts[order - 1].items():
            by_context[gram[:-1]][gram[-1]] = count
        for context, followers in by_context.items():
            number = sum(followers.values())
            lower = {w: _probability(probabilities, backoffs, (*context[1:], w)) for w in followers}
            kept = sum(count - _DISCOUNT for count in followers.values()) / number
            backoffs[context] = (1 - kept) / max(1e-9, 1 - sum(lower.values()))
            for word, count in followers.items():
                gram = (*context, word)
                probabilities[order - 1][gram] = (count - _DISCOUNT) / number
    unigrams[("<s>",)] = 1e-10
    lines = ["\\data\\", *(f"ngram {i + 1}={len(grams)}" for i, grams in enumerate(probabilities))]
    for order, grams in enumerate(probabilities, 1):
        lines.append(f"\n\\{order}-grams:")
        for gram, probability in sorted(grams.items()):
            backoff = f" {math.log10(max(backoffs[gram], 1e-9)):.4f}" if gram in backoffs and order < 3 else ""
            lines.append(f"{math.log10(probability):.4f} {' '.join(gram)}{backoff}")
    return "\n".join([*lines, "\n\\end\\", ""])


def _probability(
    probabilities: list[dict[tuple[str, ...], float]], backoffs: dict[tuple[str, ...], float], gram: tuple[str, ...]
) -> float:
    found = probabilities[len(gram) - 1].get(gram)
    if found is not None or len(gram) == 1:
        return found or 1e-9
    return backoffs.get(gram[:-1], 1.0) * _probability(probabilities, backoffs, gram[1:])
