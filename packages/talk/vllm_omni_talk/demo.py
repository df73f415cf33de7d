# SPDX-License-Identifier: Apache-2.0
"""A step of `vllm-omni demo`: `talk` answers a sentence in English text and speech.

What is right about any sentence is unknown; for the default one, a word that the answer has. The speech is judged by
PocketSphinx, which is given the words of the text, but not their order. With its own vocabulary of 130,000 words it
misses words of clear speech.
"""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import soundfile

from vllm_omni.entrypoints.cli.demo_results import (
    QUESTION,
    DemoResult,
    DemoRun,
    Verdict,
    print_verdict,
    stream_answer,
)
from vllm_omni.entrypoints.omni_llm import OmniLLM
from vllm_omni.errors import MissingPackageError
from vllm_omni_talk import SAMPLE_RATE
from vllm_omni_talk.packages import require_packages
from vllm_omni_talk.speakable import speakable
from vllm_omni_talk.speech_recognition import (
    count_understood,
    make_arpa,
    make_decoder,
    make_dictionary,
    recognize,
    to_input,
)

TALK = "talk"
ANSWER = "paris"
"""A word of the answer to the default sentence."""
LEAST_HEARD = 0.6
"""The share of an answer's words that must be recognized, and of the recognized words that must be the answer's."""
MAX_TOKENS = 128
"""Of an answer: about half a minute of speech."""
_SILENCE = 0.01
"""Speech has louder samples."""
_WORDS_OF_UNKNOWN = 4
"""As many words may be heard for an unknown one, such as 1984."""
_OTHER_WORDS = ("anything", "because", "children", "different", "following", "government", "information", "language")
"""In each vocabulary: with the words of a short answer alone, any noise would be one of them."""


def answer_sentence(run: DemoRun) -> None:
    """Starts `talk`, lets it answer, and closes it; writes `talk.wav`. Without its packages there is no result."""
    sentence = run.sentence
    run.step(f"starting {TALK} (a language model and a voice, on this processor)")
    try:
        require_packages()
    except MissingPackageError as error:
        print(f"      left out: {error}")
        return
    started = time.perf_counter()
    overrides = {"llm": {"default_sampling_params": {"max_tokens": MAX_TOKENS}}}
    with _printed_progress(), OmniLLM(TALK, stage_overrides=overrides, use_tqdm_on_load=False) as omni:
        print(f"      ready after {time.perf_counter() - started:.0f} s")
        print(f"      you say: {sentence}\n      it answers: ", end="", flush=True)
        answer = stream_answer(omni, sentence)
    file = "talk.wav"
    soundfile.write(run.folder / file, answer.speech.numpy(), SAMPLE_RATE)
    seconds = len(answer.speech) / SAMPLE_RATE
    times = f"{seconds:.1f} s, began after {answer.first_audio:.2f} s, complete after {answer.seconds:.1f} s"
    print(f"      speech: {run.folder}/{file}, {times}")
    notes = [f"Speech: {times}."]
    if answer.is_cut:
        print(f"      text: ended after {MAX_TOKENS} tokens")
        notes.append(f"The text was ended after {MAX_TOKENS} tokens.")
    verdict: Verdict = "cut short" if answer.is_cut else "not judged"
    if sentence == QUESTION:
        is_right = ANSWER in spoken_words(answer.text)
        verdict = verdict if answer.is_cut and is_right else "right" if is_right else "wrong"
        print_verdict("text", is_right, f"expected the word {ANSWER}")
        notes.append(f"Expected the word {ANSWER}.")
    else:
        print("      text: not judged, because nobody knows what is right")
    is_clear, note = judge_speech(answer.text, answer.speech.numpy(), ANSWER if sentence == QUESTION else "")
    print_verdict("speech", is_clear, note)
    notes.append(f"{note[0].upper()}{note[1:]}.")
    title = f'The answer to "{sentence}"'
    verdict = verdict if is_clear else "wrong"
    run.results.append(DemoResult(TALK, title, answer.text, " ".join(notes), verdict, None, file, answer.output))


@contextmanager
def _printed_progress() -> Iterator[None]:
    """Prints what the first start on a machine does, and its duration, which are logged."""
    logger, handler = logging.getLogger("vllm.omni.talk"), logging.Handler()
    level = logger.level
    handler.emit = lambda record: print(f"      {record.getMessage()}", flush=True)  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def judge_speech(text: str, speech: np.ndarray, required: str = "") -> tuple[bool, str]:
    """Whether `speech` is `text`, and why.

    Numbers in digits, and words that the recognizer's dictionary lacks, are spoken too, and heard as other words.

    Args:
        speech: float32 `[samples]`, 24 kHz.
        required: A word that must be recognized, whatever the share of the others is.
    """
    words = spoken_words(text)
    if not words:
        return True, "not judged: the text has nothing to speak"
    if not len(speech) or np.abs(speech).max() < _SILENCE:
        return False, "silence"
    known, heard = _recognize(words, speech)
    if not known:
        return True, "not judged: PocketSphinx knows no word of the text"
    num = count_understood(known, heard)
    note = f"{num} of {len(known)} words recognized by PocketSphinx"
    if required and required not in heard:
        return False, f"{note}, but not {required}"
    others = max(0, len(heard) - num - _WORDS_OF_UNKNOWN * (len(words) - len(known)))
    if num + others > len(known) / LEAST_HEARD:
        note += f", and {others} others"
    return num >= LEAST_HEARD * max(len(known), num + others), note


def spoken_words(text: str) -> list[str]:
    """What is spoken of a text, in lower case, without punctuation."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", speakable(text).lower().replace("\u2019", "'"))


def _recognize(words: Sequence[str], speech: np.ndarray) -> tuple[list[str], list[str]]:
    """
    Returns:
        Those of `words` that are in the dictionary, and what is heard of them and of `_OTHER_WORDS`.
    """
    dictionary = make_dictionary(sorted({*words, *_OTHER_WORDS}))
    entries = {line.split(" ")[0] for line in dictionary.splitlines()}
    known = [word for word in words if word in entries]
    vocabulary = sorted({*known, *_OTHER_WORDS})
    decoder = make_decoder(dict=dictionary, lm=make_arpa([[word] for word in vocabulary], vocabulary))
    return known, recognize(decoder, to_input(speech, SAMPLE_RATE)).split()
