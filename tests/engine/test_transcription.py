# SPDX-License-Identifier: Apache-2.0
"""The text of a clip: without times, and without words where nobody speaks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_omni.engine.transcription import ClipText, TimedVocabulary, check_english
from vllm_omni.inputs import TranscriptionParameters

START, NO_SPEECH, WORD = 1, 2, 3
VOCABULARY = TimedVocabulary(start=START, no_speech=NO_SPEECH, suppressed=(), first_time=4, is_multilingual=True)
POST_PROCESSOR = SimpleNamespace(process_delta=lambda text, finished: text)


def logprobs(token: int, probability: float) -> dict[int, Any]:
    return {token: SimpleNamespace(logprob=np.log(probability))}


def output(text: str, *, finished: bool = True, no_speech: float | None = None, word: float = 0.9) -> Any:
    """The engine's, of one token; with `no_speech` the first one of a clip, whose context has the same start."""
    prompt = None if no_speech is None else [None, {}, {}, logprobs(NO_SPEECH, no_speech)]
    completion = SimpleNamespace(text=text, token_ids=[WORD], logprobs=[logprobs(WORD, word)])
    return SimpleNamespace(
        outputs=[completion], finished=finished, prompt_token_ids=[START, WORD, START, WORD], prompt_logprobs=prompt
    )


def clip() -> ClipText:
    return ClipText(VOCABULARY, POST_PROCESSOR)


def test_a_text_has_no_times_and_no_blank_before_it() -> None:
    assert clip().take(output("<|0.00|> A cat.<|1.20|>", no_speech=0.0)) == "A cat."
    pieces = [output("<|0.00|>", finished=False, no_speech=0.1), output(" A", finished=False), output(" cat.")]
    text = clip()
    assert [text.take(piece) for piece in pieces] == ["", "A", " cat."]
    assert text.text == "A cat." and not text.is_silent


@pytest.mark.parametrize(
    ("no_speech", "word", "expected"),
    [(0.7, 0.3, ""), (0.7, 0.5, "you"), (0.5, 0.3, "you")],
    ids=["silence", "likely words", "speech"],
)
def test_there_are_no_words_where_nobody_speaks(no_speech: float, word: float, expected: str) -> None:
    """Both hold, as in the paper: no speech is likely, and the words are not."""
    text = clip()
    assert text.take(output(" you", no_speech=no_speech, word=word)) == text.text == expected
    assert text.is_silent == (not expected) and text.no_speech_prob == pytest.approx(no_speech)


def test_digital_silence_has_no_words() -> None:
    text = ClipText(VOCABULARY, POST_PROCESSOR, is_silent=True)
    assert text.take(output(" you", finished=False, no_speech=0.5)) == text.take(output(" there")) == text.text == ""


def test_a_stream_waits_where_there_may_be_no_words() -> None:
    for last, expected in ((0.9, " you there".lstrip()), (0.01, "")):
        text = clip()
        first = output(" you", finished=False, no_speech=0.7, word=0.3)
        assert text.take(first) == "" and text.take(output(" there", word=last)) == expected


def test_english_alone() -> None:
    check_english(TranscriptionParameters())
    check_english(TranscriptionParameters(language="en"))
    with pytest.raises(ValueError, match="English only; language may not be 'de'"):
        check_english(TranscriptionParameters(language="de"))
    with pytest.raises(ValueError, match="does not translate"):
        check_english(TranscriptionParameters(task="translate"))
