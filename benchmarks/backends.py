# SPDX-License-Identifier: Apache-2.0
"""What makes the same speech of the same prompts: HF transformers, `OmniLLM`, and clients of `AsyncOmniLLM`."""

import asyncio
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from report import mean, percentile, underrun
from vllm import SamplingParams

from vllm_omni import ARSegmentEvent, AsyncOmniLLM, CompletedEvent, ErrorEvent, OmniLLM
from vllm_omni.inputs import OmniPrompt
from vllm_omni.testing.hf_oracle import HFOracle, OracleResult

WAVE_RATE = 24_000
REPETITION_PENALTY = 1.05
CLEARLY_FASTER = 0.9
TRIALS, TRIAL_TEXT_TOKENS, TRIAL_TALKER_TOKENS = 2, 4, 9
TEXT_TOKENS = 40
HF_PROMPTS = 4
CODES = {"qwen2_5_omni": (50.0, 0), "qwen3_omni_moe": (12.5, 1)}
"""The talker's tokens for a second of speech, and those that make none."""

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


@dataclass
class Response:
    """What a client received of one request, and when. Times are seconds since it was sent.

    Attributes:
        segments: When each segment of speech arrived, and how long it plays.
        samples: Of the speech.
    """

    first_text: float = 0.0
    segments: list[tuple[float, float]] = field(default_factory=list)
    completed: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    samples: int = 0

    @property
    def first_audio(self) -> float:
        return self.segments[0][0]

    @property
    def real_time_factor(self) -> float:
        return self.completed * WAVE_RATE / self.samples

    @property
    def gaps(self) -> list[float]:
        return [later - sooner for (sooner, _), (later, _) in itertools.pairwise(self.segments)]

    @property
    def underrun(self) -> float:
        return underrun(self.segments)

    def add(self, event: ARSegmentEvent | CompletedEvent, when: float) -> None:
        if isinstance(event, CompletedEvent):  # of a client that does not stream
            text, speech = event.outputs
            self.first_text, self.token_ids = when, list(text.outputs[0].token_ids)
            self._add_audio(len(speech.multimodal_output["audio"]), when)
        elif event.final_output_type == "text":
            self.first_text = self.first_text or when
            self.token_ids += event.tokens
        elif "audio" in event.multimodal_output:
            self._add_audio(len(event.multimodal_output["audio"]), when)

    def _add_audio(self, samples: int, when: float) -> None:
        self.samples += samples
        self.segments.append((when, samples / WAVE_RATE))


@dataclass(frozen=True)
class Client:
    llm: AsyncOmniLLM
    params: list[Any]
    streams: bool

    def run(self, prompts: list[OmniPrompt], concurrency: int) -> tuple[float, list[Response]]:
        """All prompts, `concurrency` at a time. Returns the seconds, and responses in the order of the prompts."""
        numbered = enumerate(prompts)
        responses: dict[int, Response] = {}

        async def send_next(waiting: Iterator[tuple[int, OmniPrompt]]) -> None:
            for number, prompt in waiting:
                responses[number] = await self.send(prompt)

        async def send_all() -> None:
            await asyncio.gather(*(send_next(numbered) for _ in range(concurrency)))

        started = time.monotonic()
        asyncio.run(send_all())
        return time.monotonic() - started, [responses[number] for number in sorted(responses)]

    async def send(self, prompt: OmniPrompt) -> Response:
        response, started = Response(), time.monotonic()
        async for event in self.llm.generate(prompt, self.params, stream=self.streams):
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, ARSegmentEvent) or (isinstance(event, CompletedEvent) and not self.streams):
                response.add(event, time.monotonic() - started)
        response.completed = time.monotonic() - started
        return response


@dataclass
class Measurement:
    """All rounds of one client at one concurrency."""

    seconds: float = 0.0
    responses: list[Response] = field(default_factory=list)

    @property
    def requests_per_second(self) -> float:
        return len(self.responses) / self.seconds

    @property
    def first_audio(self) -> float:
        return percentile([response.first_audio for response in self.responses], 50)

    def row(self) -> dict[str, float]:
        responses = self.responses
        gaps = [gap for response in responses for gap in response.gaps] or [0.0]
        return {
            "requests/s": self.requests_per_second,
            "tokens/s": sum(len(response.token_ids) for response in responses) / self.seconds,
            "sound s/s": sum(response.samples for response in responses) / WAVE_RATE / self.seconds,
            "TTFT p50 s": percentile([response.first_text for response in responses], 50),
            "TTFA p50 s": self.first_audio,
            "TTFA p99 s": percentile([response.first_audio for response in responses], 99),
            "RTF p50": percentile([response.real_time_factor for response in responses], 50),
            "gap p95 s": percentile(gaps, 95),
            "underrun max s": max(response.underrun for response in responses),
            "underran": mean([float(response.underrun > 0) for response in responses]),
        }


@dataclass(frozen=True)
class Plan:
    concurrencies: list[int]
    rounds: int
    speech_seconds: float

    def talker_tokens(self, model: str) -> int:
        per_second, extra = CODES[model]
        return round(per_second * self.speech_seconds) + extra


def row_of(figures: Figures, plan: Plan) -> dict[str, float]:
    """As `Measurement.row`, of a backend whose whole result arrives at once."""
    first = percentile(figures.jct, 50)
    return {
        "requests/s": figures.requests_per_second,
        "tokens/s": figures.requests_per_second * TEXT_TOKENS,
        "sound s/s": figures.audio_seconds_per_second,
        "TTFT p50 s": first,
        "TTFA p50 s": first,
        "TTFA p99 s": percentile(figures.jct, 99),
        "RTF p50": first / plan.speech_seconds,
        "gap p95 s": 0.0,
        "underrun max s": 0.0,
        "underran": 0.0,
    }
