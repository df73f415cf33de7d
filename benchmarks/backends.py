# SPDX-License-Identifier: Apache-2.0
"""The backends that `offline.py` compares: HF transformers and `OmniLLM`, on the same prompts at the same length."""

import itertools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from report import mean, percentile
from vllm import SamplingParams

from vllm_omni import OmniLLM
from vllm_omni.inputs import OmniPrompt
from vllm_omni.testing.hf_oracle import HFOracle, OracleResult

WAVE_RATE = 24_000
REPETITION_PENALTY = 1.05
CLEARLY_FASTER = 0.9
TRIALS, TRIAL_TEXT_TOKENS, TRIAL_TALKER_TOKENS = 2, 4, 9

Prompts = list[OmniPrompt]


@dataclass(frozen=True)
class Load:
    """The requests of each round.

    Attributes:
        serial_prompts: Prompts for a backend that takes one at a time.
        waves: How often as many prompts as the concurrency are sent at once.
        text_tokens, talker_tokens: Length of every result. The last token of a Qwen3-Omni talker makes no frame.
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

    def ratios_to(self, baseline: "Figures") -> dict[str, float]:
        return {
            "requests_per_second": self.requests_per_second / baseline.requests_per_second,
            "audio_seconds_per_second": self.audio_seconds_per_second / baseline.audio_seconds_per_second,
            "mean_jct_speedup": mean(baseline.jct) / mean(self.jct),
            "p95_jct_speedup": percentile(baseline.jct, 95) / percentile(self.jct, 95),
        }


@dataclass(frozen=True)
class Result:
    """Enough of a result to know that two backends did the same work."""

    token_ids: list[int]
    samples: int


class HFBackend:
    """Transformers, one request at a time, on `threads` threads. Keeps results by the index of the prompt."""

    def __init__(self, oracle: HFOracle, load: Load, threads: int) -> None:
        self.name = f"HF transformers, {threads} thread{'s' * (threads > 1)}"
        self._oracle = oracle
        self._load = load
        self._threads = threads
        self._seconds: list[float] = []
        self._audio_seconds = 0.0
        self.results: dict[int, Result] = {}

    def warm_up(self, prompts: Prompts) -> None:
        self.time_short_result(prompts)

    def time_short_result(self, prompts: Prompts) -> float:
        return self._generate(prompts[0], TRIAL_TEXT_TOKENS, TRIAL_TALKER_TOKENS).seconds

    def run(self, prompts: Prompts) -> None:
        for index, prompt in enumerate(prompts[: self._load.serial_prompts]):
            result = self._generate(prompt, self._load.text_tokens, self._load.talker_tokens)
            self._seconds.append(result.seconds)
            self._audio_seconds += len(result.audio) / WAVE_RATE
            self.results[index] = Result(result.thinker_token_ids, len(result.audio))

    def figures(self, concurrency: int) -> Figures:
        """Of requests that are sent together, each waits for those before it."""
        busy = sum(self._seconds)
        return Figures(len(self._seconds) / busy, self._audio_seconds / busy, _queued(self._seconds, concurrency))

    def _generate(self, prompt: OmniPrompt, text_tokens: int, talker_tokens: int) -> OracleResult:
        self._oracle.num_threads = self._threads
        return self._oracle.generate(
            prompt,
            thinker_min_tokens=text_tokens,
            thinker_max_tokens=text_tokens,
            talker_min_tokens=talker_tokens,
            talker_max_tokens=talker_tokens,
            repetition_penalty=REPETITION_PENALTY,
        )


class OmniBackend:
    """`OmniLLM`, `concurrency` requests at a time. Keeps results by the index of the prompt."""

    name = "OmniLLM"

    def __init__(self, llm: OmniLLM, load: Load, concurrency: int) -> None:
        self.concurrency = concurrency
        self._llm = llm
        self._num_prompts = load.num_prompts(concurrency)
        self._params = sampling_params(load.text_tokens, load.talker_tokens)
        self._busy = 0.0
        self._audio_seconds = 0.0
        self._jct: list[float] = []
        self.results: dict[int, Result] = {}

    def warm_up(self, prompts: Prompts) -> None:
        self._llm.generate(prompts[: self.concurrency], self._params, use_tqdm=False)

    def run(self, prompts: Prompts) -> None:
        prompts = prompts[: self._num_prompts]
        for start in range(0, len(prompts), self.concurrency):
            self._run_wave(prompts[start : start + self.concurrency], start)

    def figures(self) -> Figures:
        return Figures(len(self._jct) / self._busy, self._audio_seconds / self._busy, self._jct)

    def _run_wave(self, prompts: Prompts, first_index: int) -> None:
        started = time.monotonic()
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        self._busy += time.monotonic() - started
        texts, speeches = outputs[::2], outputs[1::2]
        for index, (text, speech) in enumerate(zip(texts, speeches, strict=True), first_index):
            samples = len(speech.multimodal_output["audio"])
            self._jct.append(max(metrics.finished for metrics in speech.stage_metrics) - started)
            self._audio_seconds += samples / WAVE_RATE
            self.results[index] = Result(list(text.outputs[0].token_ids), samples)


def sampling_params(text_tokens: int, talker_tokens: int) -> list[SamplingParams | None]:
    """Greedy, of fixed length."""
    thinker = SamplingParams(temperature=0, min_tokens=text_tokens, max_tokens=text_tokens)
    talker = SamplingParams(
        temperature=0,
        min_tokens=talker_tokens,
        max_tokens=talker_tokens,
        repetition_penalty=REPETITION_PENALTY,
        detokenize=False,
    )
    return [thinker, talker, None]


def _queued(seconds: list[float], concurrency: int) -> list[float]:
    """Completion times of requests that are sent `concurrency` at once and run one by one.

    Where the last group would be smaller, requests from the start fill it up.
    """
    groups = math.ceil(len(seconds) / concurrency)
    endless = itertools.cycle(seconds)
    return [done for _ in range(groups) for done in itertools.accumulate(itertools.islice(endless, concurrency))]


def hf_backends(oracle: HFOracle, load: Load, prompts: Prompts) -> list[HFBackend]:
    """HF on one thread, and on more where a trial is clearly faster: more threads slow small models down."""
    cores = len(os.sched_getaffinity(0))
    single = HFBackend(oracle, load, 1)
    best, least = single, _trial(single, prompts, math.inf)
    for threads in sorted({min(8, cores), cores} - {1}):
        choice = HFBackend(oracle, load, threads)
        seconds = _trial(choice, prompts, 2 * least)
        if seconds < CLEARLY_FASTER * least:
            best, least = choice, seconds
    return [single] if best is single else [single, best]


def _trial(backend: HFBackend, prompts: Prompts, limit: float) -> float:
    """The least of several times; only one, where that is over the limit already."""
    first = backend.time_short_result(prompts)
    if first > limit:
        return first
    return min(first, *(backend.time_short_result(prompts) for _ in range(TRIALS - 1)))


def check_results(baseline: HFBackend, others: Sequence[HFBackend | OmniBackend]) -> None:
    """
    Raises:
        ValueError: A backend made other tokens, or a wave of another length.
    """
    for backend in others:
        for index, result in baseline.results.items():
            if backend.results[index] != result:
                raise ValueError(f"prompt {index}: {backend.name} made {backend.results[index]}, not {result}")
