# SPDX-License-Identifier: Apache-2.0
"""PocketSphinx with its own acoustic model of English, and a dictionary and a language model of given words.

Needs the package `pocketsphinx` (extra `recognizer`), which brings the acoustic model. Knows no model of ours.
"""

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pocketsphinx

RATE = 16_000
"""Samples per second of what PocketSphinx recognizes."""
_DISCOUNT = 0.5


def make_decoder(**texts: str) -> "pocketsphinx.Decoder":
    """A decoder; without arguments that of PocketSphinx's own dictionary and trigrams.

    Args:
        texts: The contents of its files, by its options: `dict`, of `make_dictionary`; `lm`, of `make_arpa`; `jsgf`, a
            grammar instead of a language model.
    """
    import pocketsphinx

    with tempfile.TemporaryDirectory() as folder:
        files = {option: Path(folder, option) for option in texts}
        for option, file in files.items():
            file.write_text(texts[option])
        paths = {option: str(file) for option, file in files.items()}
        return pocketsphinx.Decoder(samprate=RATE, loglevel="FATAL", **paths)


def to_input(samples: np.ndarray, rate: int) -> np.ndarray:
    """What `recognize` takes, int16 `[samples]` at 16 kHz, of float32 `[samples]` in -1 to 1, `rate` a second."""
    return (resample(samples, rate, RATE).clip(-1, 1) * 32767).astype(np.int16)


def recognize(decoder: "pocketsphinx.Decoder", samples: np.ndarray) -> str:
    """The words of a whole recording, in lower case. They depend on nothing that the decoder has heard before.

    Args:
        samples: int16 `[samples]`, 16 kHz. PocketSphinx would hear a random word in silence without any noise.
    """
    if not (np.abs(samples.astype(np.int32)) > 1).any():
        return ""
    decoder.reinit_feat()  # Else the mean of the spectrum goes on from the utterance before.
    decoder.start_utt()
    decoder.process_raw(samples.tobytes(), full_utt=True)
    decoder.end_utt()
    hypothesis = decoder.hyp()
    return hypothesis.hypstr if hypothesis else ""


def count_understood(expected: Sequence[str], heard: Sequence[str]) -> int:
    """Words of `expected` that were heard, in order."""
    blocks = SequenceMatcher(None, expected, heard, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks)


def resample(samples: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
    """float32 `[samples]` at another rate, by zeros, or a cut, in the spectrum."""
    if rate == new_rate:
        return samples
    length = len(samples) * new_rate // rate
    spectrum = np.fft.rfft(samples)
    kept = np.zeros(length // 2 + 1, complex)
    kept[: len(spectrum)] = spectrum[: len(kept)]
    return (np.fft.irfft(kept, length) * (length / len(samples))).astype(np.float32)


def make_dictionary(words: Iterable[str]) -> str:
    """The pronunciations that PocketSphinx has for `words`: none for unknown ones.

    With its whole dictionary of 130,000 words a language model takes 10 s to load.
    """
    import pocketsphinx

    decoder = pocketsphinx.Decoder(samprate=RATE, loglevel="FATAL", lm=None)
    lines = []
    for word in words:
        names = (word, *(f"{word}({number})" for number in range(2, 10)))
        lines += [f"{name} {sounds}\n" for name in names if (sounds := decoder.lookup_word(name))]
    return "".join(lines)


def make_arpa(sentences: Iterable[Sequence[str]], vocabulary: Sequence[str]) -> str:
    """A trigram model with absolute discounting, in the format of ARPA.

    Args:
        vocabulary: All words of the sentences, and others, which are possible anywhere.
    """
    counts: list[Counter[tuple[str, ...]]] = [Counter(), Counter(), Counter()]
    for sentence in sentences:
        words = ("<s>", *sentence, "</s>")
        for order in (1, 2, 3):
            counts[order - 1].update(words[i : i + order] for i in range(len(words) - order + 1))
    unigrams: dict[tuple[str, ...], float] = {}
    predicted = (*vocabulary, "</s>")
    total = sum(count for gram, count in counts[0].items() if gram != ("<s>",)) + len(predicted)
    for word in predicted:
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
