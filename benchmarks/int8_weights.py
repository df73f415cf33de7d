# SPDX-License-Identifier: Apache-2.0
"""`talk` with its language model in int8 beside the 16 bits of its checkpoint: a part of `laptop.py`."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from report import Report, mean, percentile, progress
from transformers import AutoTokenizer
from voice import QUESTIONS

from vllm_omni import OmniLLM
from vllm_omni.engine.engine_args import HAS_INT8_PRODUCTS
from vllm_omni_talk import SAMPLE_RATE
from vllm_omni_talk.demo import spoken_words
from vllm_omni_talk.speech_recognition import count_understood
from vllm_omni_talk.weights import language_model

MORE_QUESTIONS = (
    "Describe the taste of a lemon.", "How do birds fly?", "Give me three tips for sleeping better.",
    "What does a computer's memory do?", "Tell me a short story about a fox.", "Why is exercise healthy?",
    "What is two plus three?", "Name three fruits.", "How is glass made?", "Why do we have seasons?",
    "Explain how a bridge carries a load.", "What should I cook for dinner?",
)  # fmt: skip
ANSWER_TOKENS, TIMED_TOKENS = 96, 64
CALLERS = (1, 8)
PART = 1024
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        speech: Float32 `[samples]`, 24 kHz.
    """

    tokens: Sequence[int]
    text: str
    speech: torch.Tensor


@dataclass(frozen=True)
class Talk:
    omni: OmniLLM

    def answer(self, questions: Sequence[str]) -> list[Answer]:
        outputs = self._chat(questions, {"max_tokens": ANSWER_TOKENS}, ["text", "audio"])
        pairs = zip(outputs[::2], outputs[1::2], strict=True)
        return [
            Answer(text.outputs[0].token_ids, text.outputs[0].text, sound.multimodal_output["audio"])
            for text, sound in pairs
        ]

    def rate(self, questions: Sequence[str]) -> float:
        """Tokens/s of answers to all questions at once."""
        length = {"max_tokens": TIMED_TOKENS, "ignore_eos": True}
        started = time.monotonic()
        outputs = self._chat(questions, length, ["text"])
        return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.monotonic() - started)

    def share_understood(self, answer: Answer) -> float:
        """Of the words of an answer in its speech, by the recognizer of the pipeline."""
        sound = (answer.speech.numpy(), SAMPLE_RATE)
        (heard,) = self.omni.generate([{"stage": "asr", "multi_modal_data": {"audio": sound}}], use_tqdm=False)
        words = spoken_words(answer.text)
        return count_understood(words, spoken_words(heard.outputs[0].text)) / max(1, len(words))

    def read(self, parts: Sequence[Sequence[int]]) -> tuple[float, list[int]]:
        """The perplexity of texts, and for each token of them but the first the most likely one."""
        prompts: Any = [{"prompt_token_ids": list(part), "modalities": ["text"]} for part in parts]
        params = [None, {"max_tokens": 1, "prompt_logprobs": 1}, None]
        losses, likely = [], []
        for answer in self.omni.generate(prompts, params, use_tqdm=False):
            output: Any = answer.request_output[0]
            for token, entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
                losses.append(-entries[token].logprob)
                likely.append(next(other for other, entry in entries.items() if entry.rank == 1))
        return math.exp(mean(losses)), likely

    def _chat(self, questions: Sequence[str], params: dict[str, Any], modalities: list[str]) -> list[Any]:
        messages: Any = [[{"role": "user", "content": question}] for question in questions]
        return self.omni.chat(messages, [None, params, None], use_tqdm=False, modalities=modalities)


def open_talk(quantization: str | None) -> OmniLLM:
    """The pipeline with the weights of its language model in `quantization`; None: as in its checkpoint."""
    return OmniLLM("talk", stage_overrides={"llm": {"quantization": quantization}}, use_tqdm_on_load=False)


def num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens before the first one that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def documentation(num_parts: int) -> list[list[int]]:
    text = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    ids = AutoTokenizer.from_pretrained(language_model(with_weights=True))(text).input_ids
    return [ids[start : start + PART] for start in range(0, num_parts * PART, PART)]


def add_int8(report: Report, rounds: int, *, is_quick: bool) -> None:
    """Compares both, and adds a row for each figure, and notes."""
    if not HAS_INT8_PRODUCTS:
        raise SystemExit("this processor does not multiply int8")
    questions, num_parts = (QUESTIONS, 2) if is_quick else (QUESTIONS + MORE_QUESTIONS, 8)
    progress("starting talk, twice")
    with open_talk(None) as exact, open_talk("int8") as rounded:
        compare(report, Talk(exact), Talk(rounded), questions, rounds, num_parts)


def compare(report: Report, exact: Talk, rounded: Talk, questions: Sequence[str], rounds: int, num_parts: int) -> None:
    """Adds a row for each figure, and notes."""
    both = (exact, rounded)

    def add(what: str, values: Sequence[float], unit: str = "") -> None:
        report.rows.append({"what": what, "16 bits": values[0], "int8": values[1], "unit": unit})

    progress("answers")
    answers = [each.answer(questions) for each in both]
    understood = [mean(map(each.share_understood, found)) for each, found in zip(both, answers, strict=True)]
    add("words of answers that are understood", [100 * share for share in understood], "%")
    report.notes.append(describe_equal([(a.tokens, b.tokens) for a, b in zip(*answers, strict=True)]))
    progress("perplexity")
    parts = documentation(num_parts)
    perplexities, likely = zip(*(each.read(parts) for each in both), strict=True)
    add("perplexity", perplexities)
    report.ratios["perplexity"] = perplexities[1] / perplexities[0]
    same = mean(a == b for a, b in zip(*likely, strict=True))
    report.notes.append(f"the most likely next token is the same for {same:.1%} of {len(likely[0]):,} tokens")
    for callers in CALLERS:
        rates: list[list[float]] = [[], []]
        for number in range(rounds):
            progress(f"{callers} callers, round {number + 1}")
            for each, found in zip(both, rates, strict=True):
                found.append(each.rate(questions[:callers]))
        add(f"callers {callers}", [percentile(found, 50) for found in rates], "tokens/s")
        ratios = [int8 / float16 for float16, int8 in zip(*rates, strict=True)]
        report.ratios[f"callers_{callers}"] = percentile(ratios, 50)
        report.notes.append(f"callers {callers}: ratios of the rounds {min(ratios):.2f} to {max(ratios):.2f}")


def describe_equal(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """How many answers have the same tokens, and where others begin to differ."""
    different = [(a, b) for a, b in pairs if list(a) != list(b)]
    equal = [num_equal(*pair) for pair in pairs]
    share = sum(equal) / sum(max(map(len, pair)) for pair in pairs)
    text = (
        f"{len(pairs) - len(different)} of {len(pairs)} answers are equal, and {share:.0%} of all tokens before another"
    )
    first = percentile([num_equal(*pair) + 1 for pair in different], 50) if different else None
    return text if first is None else f"{text}; the others differ from token {first} on, in the median"
