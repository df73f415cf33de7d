# SPDX-License-Identifier: Apache-2.0
"""Who is compared in `offline.py`: HF transformers and `OmniLLM`, answering the same prompts at the same length.

Knows nothing of checkpoints, rounds and reports.
"""

import itertools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from report import mean, percentile
from vllm import SamplingParams

from vllm_omni import OmniLLM, OmniRequestOutput
from vllm_omni.testing.hf_oracle import HFOracle, OracleResult

WAVE_RATE = 24_000
REPETITION_PENALTY = 1.05
CLEARLY_FASTER = 0.9
TRIALS, TRIAL_TEXT_TOKENS, TRIAL_TALKER_TOKENS = 2, 4, 9

Prompts = list[dict[str, Any]]


@dataclass(frozen=True)
class Load:
    """How much is asked for in each round.

    Attributes:
        serial_prompts: Prompts for those who take one at a time.
        waves: How often as many prompts as the concurrency are given at once.
        text_tokens, talker_tokens: Length of every answer. The last token of a Qwen3-Omni talker makes no frame.
    """

    rounds: int
    serial_prompts: int
    waves: int
    text_tokens: int
    talker_tokens: int

    def num_prompts(self, concurrency: int) -> int:
        return max(self.serial_prompts, self.waves * concurrency)


@dataclass(frozen=True)
class Figures:
    """What is compared, at one concurrency. `jct` are job completion times in seconds of wall time."""

    requests_per_second: float
    audio_seconds_per_second: float
    jct: list[float]

    def ratios_to(self, reference: "Figures") -> dict[str, float]:
        return {
            "requests_per_second": self.requests_per_second / reference.requests_per_second,
            "audio_seconds_per_second": self.audio_seconds_per_second / reference.audio_seconds_per_second,
            "mean_jct_speedup": mean(reference.jct) / mean(self.jct),
            "p95_jct_speedup": percentile(reference.jct, 95) / percentile(self.jct, 95),
        }


class Contestant(Protocol):
    """Answers prompts, and keeps what it answered by the index of the prompt."""

    name: str
    replies: dict[int, "Reply"]

    def warm_up(self, prompts: Prompts) -> None: ...

    def run(self, prompts: Prompts) -> None: ...


@dataclass(frozen=True)
class Reply:
    """Enough of an answer to know that two contestants did the same work."""

    token_ids: list[int]
    samples: int


class HFContestant:
    """Transformers, one request at a time, on `threads` threads."""

    def __init__(self, oracle: HFOracle, load: Load, threads: int) -> None:
        self.name = f"HF transformers, {threads} thread{'s' * (threads > 1)}"
        self._oracle = oracle
        self._load = load
        self._threads = threads
        self._seconds: list[float] = []
        self._audio_seconds = 0.0
        self.replies: dict[int, Reply] = {}

    def warm_up(self, prompts: Prompts) -> None:
        self.try_out(prompts)

    def try_out(self, prompts: Prompts) -> float:
        """Seconds for a short answer."""
        return self._answer(prompts[0], TRIAL_TEXT_TOKENS, TRIAL_TALKER_TOKENS).seconds

    def run(self, prompts: Prompts) -> None:
        for index, prompt in enumerate(prompts[: self._load.serial_prompts]):
            result = self._answer(prompt, self._load.text_tokens, self._load.talker_tokens)
            self._seconds.append(result.seconds)
            self._audio_seconds += len(result.audio) / WAVE_RATE
            self.replies[index] = Reply(result.thinker_token_ids, len(result.audio))

    def figures(self, concurrency: int) -> Figures:
        """Of requests that come together, each waits for those before it."""
        busy = sum(self._seconds)
        return Figures(len(self._seconds) / busy, self._audio_seconds / busy, _queued(self._seconds, concurrency))

    def _answer(self, prompt: dict[str, Any], text_tokens: int, talker_tokens: int) -> OracleResult:
        self._oracle.num_threads = self._threads
        return self._oracle.generate(
            prompt,
            thinker_min_tokens=text_tokens,
            thinker_max_tokens=text_tokens,
            talker_min_tokens=talker_tokens,
            talker_max_tokens=talker_tokens,
            repetition_penalty=REPETITION_PENALTY,
        )


class OmniContestant:
    """`OmniLLM`, `concurrency` requests at a time."""

    name = "vllm_omni"

    def __init__(self, llm: OmniLLM, load: Load, concurrency: int) -> None:
        self.concurrency = concurrency
        self._llm = llm
        self._num_prompts = load.num_prompts(concurrency)
        self._params = sampling_params(load)
        self._busy = 0.0
        self._audio_seconds = 0.0
        self._jct: list[float] = []
        self.replies: dict[int, Reply] = {}

    def warm_up(self, prompts: Prompts) -> None:
        self._llm.generate(prompts[: self.concurrency], self._params, use_tqdm=False)

    def run(self, prompts: Prompts) -> None:
        prompts = prompts[: self._num_prompts]
        for start in range(0, len(prompts), self.concurrency):
            self._run_together(prompts[start : start + self.concurrency], start)

    def figures(self) -> Figures:
        return Figures(len(self._jct) / self._busy, self._audio_seconds / self._busy, self._jct)

    def _run_together(self, prompts: Prompts, first_index: int) -> None:
        started = time.monotonic()
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        self._busy += time.monotonic() - started
        texts, speeches = outputs[::2], outputs[1::2]
        for index, (text, speech) in enumerate(zip(texts, speeches, strict=True), first_index):
            samples = len(speech.multimodal_output["audio"])
            self._jct.append(_finished(speech) - started)
            self._audio_seconds += samples / WAVE_RATE
            self.replies[index] = Reply(list(text.outputs[0].token_ids), samples)


def sampling_params(load: Load) -> list[SamplingParams | None]:
    """Greedy, of fixed length."""
    thinker = SamplingParams(temperature=0, min_tokens=load.text_tokens, max_tokens=load.text_tokens)
    talker = SamplingParams(
        temperature=0,
        min_tokens=load.talker_tokens,
        max_tokens=load.talker_tokens,
        repetition_penalty=REPETITION_PENALTY,
        detokenize=False,
    )
    return [thinker, talker, None]


def _finished(output: OmniRequestOutput) -> float:
    """When the last stage was done with the request, by `time.monotonic()`."""
    return max(metrics.finished for metrics in output.stage_metrics)


def _queued(seconds: list[float], concurrency: int) -> list[float]:
    """Completion times of requests that come `concurrency` at once and are worked on one by one.

    Where the last group would be smaller, requests from the start fill it up.
    """
    groups = math.ceil(len(seconds) / concurrency)
    endless = itertools.cycle(seconds)
    return [done for _ in range(groups) for done in itertools.accumulate(itertools.islice(endless, concurrency))]


def hf_contestants(oracle: HFOracle, load: Load, prompts: Prompts) -> list[HFContestant]:
    """HF on one thread, and on more where a trial is clearly faster: small models lose by it, above all under load."""
    cores = len(os.sched_getaffinity(0))
    single = HFContestant(oracle, load, 1)
    best, least = single, _trial(single, prompts, math.inf)
    for threads in sorted({min(8, cores), cores} - {1}):
        choice = HFContestant(oracle, load, threads)
        seconds = _trial(choice, prompts, 2 * least)
        if seconds < CLEARLY_FASTER * least:
            best, least = choice, seconds
    return [single] if best is single else [single, best]


def _trial(contestant: HFContestant, prompts: Prompts, limit: float) -> float:
    """The least of several times; only one, where that is over the limit already."""
    first = contestant.try_out(prompts)
    if first > limit:
        return first
    return min(first, *(contestant.try_out(prompts) for _ in range(TRIALS - 1)))


def check_replies(reference: HFContestant, others: Sequence[Contestant]) -> None:
    """
    Raises:
        ValueError: Somebody answered with other tokens, or with a wave of another length.
    """
    for contestant in others:
        for index, reply in reference.replies.items():
            if contestant.replies[index] != reply:
                raise ValueError(f"prompt {index}: {contestant.name} gave {contestant.replies[index]}, not {reply}")
