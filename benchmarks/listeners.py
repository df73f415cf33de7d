# SPDX-License-Identifier: Apache-2.0
"""Callers, most of whom listen along: what each saw of its request, and when. Knows nothing of reports and HF."""

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams

from vllm_omni import ARSegmentEvent, AsyncOmniLLM, CompletedEvent, ErrorEvent


@dataclass
class Listening:
    """One request. Times are seconds since it was sent.

    Attributes:
        first_text: The first token was there.
        chunks: When each piece of speech came, and how long it plays.
        completed: The end.
        token_ids, samples: What was said.
    """

    sample_rate: int
    first_text: float = 0.0
    chunks: list[tuple[float, float]] = field(default_factory=list)
    completed: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    samples: int = 0

    @property
    def first_audio(self) -> float:
        return self.chunks[0][0]

    @property
    def audio_seconds(self) -> float:
        return self.samples / self.sample_rate

    @property
    def real_time_factor(self) -> float:
        return self.completed / self.audio_seconds

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of speech."""
        return [later - sooner for (sooner, _), (later, _) in itertools.pairwise(self.chunks)]

    @property
    def underrun(self) -> float:
        """Seconds of silence for a listener who plays from the first piece on."""
        silence, played_until = 0.0, self.first_audio
        for when, seconds in self.chunks:
            silence += max(0.0, when - played_until)
            played_until = max(played_until, when) + seconds
        return silence

    def take(self, event: ARSegmentEvent, when: float) -> None:
        if event.final_output_type == "text":
            self.first_text = self.first_text or when
            self.token_ids += event.tokens
        elif "audio" in event.multimodal_output:
            samples = len(event.multimodal_output["audio"])
            self.samples += samples
            self.chunks.append((when, samples / self.sample_rate))

    def take_whole(self, event: CompletedEvent, when: float) -> None:
        """For one who has not listened along."""
        text, speech = event.outputs
        samples = len(speech.multimodal_output["audio"])
        self.first_text, self.token_ids, self.samples = when, list(text.outputs[0].token_ids), samples
        self.chunks = [(when, samples / self.sample_rate)]


@dataclass
class Session:
    """Requests of several callers, each of whom sends the next one when the last is done."""

    seconds: float
    listenings: list[Listening]

    @property
    def requests_per_second(self) -> float:
        return len(self.listenings) / self.seconds


@dataclass(frozen=True)
class Asker:
    """How requests are made.

    Attributes:
        streams: The caller listens along.
    """

    llm: AsyncOmniLLM
    params: Sequence[SamplingParams | None]
    sample_rate: int
    streams: bool = True


async def listen(asker: Asker, prompt: dict[str, Any]) -> Listening:
    """
    Raises:
        RequestError: The request failed.
    """
    listening, started = Listening(asker.sample_rate), time.monotonic()
    async for event in asker.llm.generate(prompt, asker.params, stream=asker.streams):
        when = time.monotonic() - started
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, ARSegmentEvent):
            listening.take(event, when)
        elif isinstance(event, CompletedEvent) and not asker.streams:
            listening.take_whole(event, when)
    listening.completed = time.monotonic() - started
    return listening


def run_session(asker: Asker, prompts: Iterable[dict[str, Any]], concurrency: int) -> Session:
    """All prompts, `concurrency` at a time. Listenings are in the order of the prompts."""
    numbered = enumerate(prompts)
    results: dict[int, Listening] = {}

    async def call(waiting: Iterator[tuple[int, dict[str, Any]]]) -> None:
        for number, prompt in waiting:
            results[number] = await listen(asker, prompt)

    async def call_all() -> None:
        await asyncio.gather(*(call(numbered) for _ in range(concurrency)))

    started = time.monotonic()
    asyncio.run(call_all())
    return Session(time.monotonic() - started, [results[number] for number in sorted(results)])
