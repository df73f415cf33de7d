# SPDX-License-Identifier: Apache-2.0
"""Latency of speech: segments streamed between stages, full hand-over, and HF transformers, in one run, in turns.

    python benchmarks/streaming.py [--models NAME ...] [--sizes default large] [--concurrency 1 8 32]
                                   [--output FILE.json] [--quick]

For each model two pipelines get the same prompts (text, image, audio and video in turn), greedily in float32, and make
10 seconds of speech for each (3 with `--quick`). One streams as its stage configuration has it; in the other every
stage hands over its whole result. Each of `--concurrency` clients sends its next request when the last one is done.
HF makes the whole speech before any of it can be played; of requests that are sent together, each waits for those
before it. Weights are random.

tokens/s, sound s/s: tokens of text, and seconds of speech, made in a second. TTFT, TTFA: time to the first token, and
to the first segment of speech. RTF: seconds for each second of speech. A gap is the time between two segments.
Underrun: seconds of silence for a client that plays from the first segment on; "underran" is the share of clients that
had any.
"""

import asyncio
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from backends import WAVE_RATE, Figures, HFBackend, Load, hf_backends, sampling_params
from report import Report, make_parser, mean, percentile, progress, underrun
from transformers.utils import logging

from vllm_omni import ARSegmentEvent, AsyncOmniLLM, CompletedEvent, ErrorEvent
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.inputs import OmniPrompt
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import mixed_prompts
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

STREAMING, WHOLE, FULL = "streaming", "streaming, client does not stream", "full hand-over"
TEXT_TOKENS = 40
HF_PROMPTS = 4
CODES = {"qwen2_5_omni": (50.0, 0), "qwen3_omni_moe": (12.5, 1)}
"""The talker's tokens for a second of speech, and those that make none."""


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
                responses[number] = await self._send(prompt)

        async def send_all() -> None:
            await asyncio.gather(*(send_next(numbered) for _ in range(concurrency)))

        started = time.monotonic()
        asyncio.run(send_all())
        return time.monotonic() - started, [responses[number] for number in sorted(responses)]

    async def _send(self, prompt: OmniPrompt) -> Response:
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


def start_hf(model: str, path: Path, plan: Plan) -> list[HFBackend]:
    load = Load(plan.rounds, HF_PROMPTS, 1, TEXT_TOKENS, plan.talker_tokens(model))
    return hf_backends(HFOracle(path), load, mixed_prompts(path, HF_PROMPTS))


def start(model: str, path: Path, plan: Plan, stack: ExitStack) -> dict[str, Client]:
    """Both pipelines of one checkpoint. An idle one costs no time."""
    config = yaml.safe_load((stage_configs_dir() / f"{model}.yaml").read_text())
    config["runtime"].pop("edges")
    full = path.with_name("full.yaml")
    full.write_text(yaml.safe_dump(config))
    llms = {
        name: stack.enter_context(
            AsyncOmniLLM(str(path), file, dtype="float32", max_model_len=2048, max_num_seqs=max(plan.concurrencies))
        )
        for name, file in ((STREAMING, None), (FULL, str(full)))
    }
    params = sampling_params(TEXT_TOKENS, plan.talker_tokens(model))
    clients = {name: Client(llm, params, streams=True) for name, llm in llms.items()}
    return clients | {WHOLE: Client(llms[STREAMING], params, streams=False)}


def measure(model: str, size: str, plan: Plan, report: Report) -> None:
    """One checkpoint: all clients, round by round. The first round warms up."""
    label = f"{model} {size}"
    measurements: dict[tuple[str, int], Measurement] = defaultdict(Measurement)
    with ExitStack() as stack:
        path = write_tiny_checkpoint(
            model, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model", size=size
        )
        progress(f"{label}: starting")
        clients = start(model, path, plan, stack)
        hf = start_hf(model, path, plan)
        for number in range(1 + plan.rounds):
            progress(f"{label}: round {number} of {plan.rounds}" if number else f"{label}: warming up")
            for concurrency in plan.concurrencies if number else plan.concurrencies[-1:]:
                prompts = mixed_prompts(path, max(4, concurrency))
                for name, client in clients.items():
                    seconds, responses = client.run(prompts, concurrency)
                    if number:
                        measurements[name, concurrency].seconds += seconds
                        measurements[name, concurrency].responses += responses
            for backend in hf if number else ():
                backend.run(mixed_prompts(path, HF_PROMPTS))
    check_responses(label, measurements)
    best = max(hf, key=lambda backend: backend.figures(1).requests_per_second)
    for (name, concurrency), measurement in measurements.items():
        report.rows.append({"model": label, "client": name, "concurrency": concurrency, **measurement.row()})
    for concurrency in plan.concurrencies:
        ours, full = (measurements[name, concurrency] for name in (STREAMING, FULL))
        hf_row = row_of(best.figures(concurrency), plan)
        report.rows.append({"model": label, "client": best.name, "concurrency": concurrency, **hf_row})
        suffix = f"{'_large' if size == 'large' else ''}_c{concurrency}"
        report.ratios[f"{model}_ttfa{suffix}"] = ours.first_audio / full.first_audio
        report.ratios[f"{model}_throughput{suffix}"] = ours.requests_per_second / full.requests_per_second
        report.ratios[f"{model}_ttfa_speedup_to_hf{suffix}"] = hf_row["TTFA p50 s"] / ours.first_audio


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


def check_responses(label: str, measurements: dict[tuple[str, int], Measurement]) -> None:
    """
    Raises:
        ValueError: The clients at one concurrency received other tokens, or speech of another length.
    """
    for (name, concurrency), measurement in measurements.items():
        expected = measurements[FULL, concurrency].responses
        for index, (response, other) in enumerate(zip(measurement.responses, expected, strict=True)):
            if (response.token_ids, response.samples) != (other.token_ids, other.samples):
                raise ValueError(f"{label}, request {index}: {name} at {concurrency} differs from {FULL}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(CODES), default=list(CODES))
    parser.add_argument("--sizes", nargs="+", choices=["default", "large"], default=["default"])
    parser.add_argument("--concurrency", type=int, nargs="+", help="clients (default 1 8 32; 1 4 with --quick)")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    concurrencies, rounds, seconds = ([1, 4], 1, 3.0) if args.quick else ([1, 8, 32], 2, 10.0)
    plan = Plan(sorted(args.concurrency or concurrencies), rounds, seconds)
    report = Report("streaming", {"quick": str(args.quick), "speech": f"{plan.speech_seconds:g} s"})
    for model in args.models:
        for size in args.sizes:
            measure(model, size, plan, report)
    report.notes += [
        "ttfa, throughput: to the full hand-over; ttfa: lower is better, throughput: higher is better",
        "ttfa_speedup_to_hf: first sound of HF, on its better number of threads, which is all of it, over ours",
    ]
    report.finish(args.output)


if __name__ == "__main__":
    main()
