# SPDX-License-Identifier: Apache-2.0
"""What every recognizer with PocketSphinx is made of."""

import re
from pathlib import Path

import numpy as np
import pytest
import soundfile

from vllm_omni_talk.speech_recognition import (
    RATE,
    count_understood,
    make_arpa,
    make_decoder,
    make_dictionary,
    recognize,
    resample,
    to_input,
)


def sine(rate: int, hertz: float = 440.0) -> np.ndarray:
    """float32, half a second."""
    return np.sin(2 * np.pi * hertz * np.arange(rate // 2) / rate).astype(np.float32)


def test_a_tone_is_the_same_at_another_rate() -> None:
    for rate, new_rate in ((24_000, RATE), (8_000, RATE), (RATE, RATE)):
        found = resample(sine(rate), rate, new_rate)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, sine(new_rate), atol=1e-5)
    assert np.abs(resample(sine(24_000, 10_000), 24_000, RATE)).max() < 1e-5, "above half of the new rate"


def test_samples_are_clipped_not_wrapped() -> None:
    samples = to_input(np.array([0.0, 0.5, 3.0, -3.0], np.float32), RATE)
    assert samples.dtype == np.int16 and samples.tolist() == [0, 16383, 32767, -32767]


def test_words_are_understood_in_order() -> None:
    assert count_understood(["a", "red", "circle"], ["a", "bread", "circle"]) == 2
    assert count_understood(["a", "red", "circle"], ["circle", "red"]) == 1
    assert count_understood(["a"], []) == 0


def test_a_language_model_is_a_distribution_over_the_next_word() -> None:
    vocabulary = ["circle", "red", "square"]
    lines = make_arpa([["red", "circle"], ["red", "square"], ["red", "circle"]], vocabulary).splitlines()
    grams = {}
    for line in lines:
        if match := re.fullmatch(r"(-[\d.]+) (.*?)(?: (-?[\d.]+))?", line):
            grams[tuple(match[2].split())] = (10 ** float(match[1]), 10 ** float(match[3] or 0))

    def probability(*gram: str) -> float:
        if gram in grams or len(gram) == 1:
            return grams[gram][0]
        return grams[gram[:-1]][1] * probability(*gram[1:])

    for context in ((), ("red",), ("<s>",)):
        total = sum(probability(*context, word) for word in (*vocabulary, "</s>"))
        assert total == pytest.approx(1, abs=1e-3)
    assert probability("red", "circle") > max(probability("red", "square"), probability("red", "red"))


def test_what_was_heard_before_changes_nothing() -> None:
    pytest.importorskip("pocketsphinx", reason="the extra recognizer is not installed")
    decoder = make_decoder()
    folder = Path(__file__).parents[1] / "coloured_shapes" / "questions"
    sounds = [to_input(*soundfile.read(file, dtype="float32")) // 200 for file in sorted(folder.glob("*.flac"))[::3]]
    texts = [recognize(decoder, sound) for sound in sounds]
    assert texts == [recognize(decoder, sound) for sound in reversed(sounds)][::-1] and len(set(texts)) == 3


@pytest.mark.parametrize("step", [0, 1])
def test_nothing_is_heard_in_silence(step: int) -> None:
    pytest.importorskip("pocketsphinx", reason="the extra recognizer is not installed")
    decoder = make_decoder()
    silence = (np.random.default_rng(0).random(3 * RATE) < 0.01).astype(np.int16) * np.int16(step)
    assert [recognize(decoder, silence[:length]) for length in (0, 1, len(silence))] == ["", "", ""]


def test_a_decoder_of_given_words_hears_no_others() -> None:
    pytest.importorskip("pocketsphinx", reason="the extra recognizer is not installed")
    dictionary = make_dictionary(["red", "circle", "qwzx"])
    assert [line.split()[0] for line in dictionary.splitlines()] == ["red", "circle"], "others are unknown"
    decoder = make_decoder(dict=dictionary, lm=make_arpa([["red", "circle"]], ["circle", "red"]))
    noise = np.random.default_rng(0).standard_normal(RATE).astype(np.float32) / 10
    assert set(recognize(decoder, to_input(noise, RATE)).split()) <= {"red", "circle"}
    assert recognize(decoder, np.zeros(RATE, np.int16)) == ""
