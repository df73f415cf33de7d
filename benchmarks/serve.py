# SPDX-License-Identifier: Apache-2.0
"""The HTTP server under load, and what it costs over `AsyncOmniLLM` called directly, in one run.

    python benchmarks/serve.py [--sizes default large] [--endpoints chat text speech images] [--concurrency 1 8 64]
                               [--rates 0.25 0.5 0.9] [--rounds N] [--vllm-bench] [--plots DIR]
                               [--output FILE.json] [--quick]

A server (`vllm serve MODEL --omni`) is asked over HTTP by a client in a process of its own; a program that has the
same pipeline in its own process is asked the same questions (text, image and sound in turn), greedily, at the same
length and at the same times. They take turns, round by round; an idle one costs nothing. Closed loop: so many callers,
each of whom sends the next request when the last is done. Open loop: requests are sent at random times (Poisson), at
shares of the highest throughput that the closed loops of the direct call had. Weights are random.

TTFT, TTFA: first text, first piece of speech. RTF: seconds for each second of speech. JCT: the whole answer. All are
the client's, since the request was sent, or was due. CPU: of the process that has the server or the program, without
its stages, for each request; unlike the times it hardly depends on what else the machine does.
"""

import statistics
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from report import Cell, Report, make_parser, progress
from serve_parts import asks, plots, vllm_bench
from serve_parts.contestants import Contestant, Server, direct_contestant, http_contestant, start_server
from serve_parts.loads import Load, Session, percentiles
from transformers.utils import logging

from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

OMNI, PAINTER = "qwen3_omni_moe", "z_image"
SAMPLE_RATE = 24_000
CODES_PER_SECOND = 12.5
SERVER, DIRECT = "server", "direct"
STREAMS = 64
MAX_ROUNDING = 2  # of 65536: in a crowd the same sums are computed in another order
TTFA_CONCURRENCY = 8  # with more callers the wait for the first sound is a wait for the others
VLLM_ARGS = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": STREAMS, "kv_cache_memory_bytes": 256 << 20}


@dataclass
class Plan:
    """How much is measured."""

    endpoints: list[str]
    concurrencies: list[int]
    rates: list[float]
    rounds: int
    num_questions: int
    min_requests: int
    speech_seconds: float
    text_tokens: int

    def closed(self, endpoint: str) -> list[Load]:
        return [Load(endpoint, max(self.min_requests, 2 * c), concurrency=c) for c in self.concurrencies]

    def opened(self, endpoint: str, most: float) -> list[Load]:
        """`most`: requests in a second that somebody has managed."""
        return [Load(endpoint, 3 * self.min_requests, rate=share * most, seed=1) for share in self.rates]


@dataclass
class Tally:
    """All sessions of one contestant with one load."""

    sessions: list[Session] = field(default_factory=list)

    @property
    def requests_per_second(self) -> float:
        """Of the median round; only what was answered counts."""
        return statistics.median(
            sum(not answer.error for answer in session.answers) / session.seconds for session in self.sessions
        )

    def times(self, name: str) -> list[float]:
        answers = [answer for session in self.sessions for answer in session.answers if not answer.error]
        return [value for answer in answers if (value := getattr(answer, name))]

    def median_first_audio(self) -> float:
        """Of the median round."""
        return statistics.median(
            statistics.median(answer.first_audio for answer in session.answers if not answer.error)
            for session in self.sessions
        )

    def row(self) -> dict[str, Cell]:
        answers = [answer for session in self.sessions for answer in session.answers]
        good = [answer for answer in answers if not answer.error]
        spoken = [answer.completed * SAMPLE_RATE / answer.num_samples for answer in good if answer.num_samples]
        milliseconds = {
            "TTFT": [1000 * value for value in self.times("first_text")],
            "TTFA": [1000 * value for value in self.times("first_audio")],
            "JCT": [1000 * value for value in self.times("completed")],
        }
        cpu = 1000 * sum(session.cpu_seconds for session in self.sessions) / len(answers)
        row: dict[str, Cell] = {"requests/s": self.requests_per_second}
        for name, values in {**milliseconds, "RTF": spoken}.items():
            row |= _named(name, values)
        return {**row, "CPU ms": cpu, "errors": len(answers) - len(good)}


Tallies = dict[tuple[str, Load], Tally]


def _named(name: str, values: list[float]) -> dict[str, Cell]:
    figures: list[Cell] = list(percentiles(values)) if values else ["", "", ""]
    return {f"{name} {percent}": value for percent, value in zip(("p50", "p95", "p99"), figures, strict=True)}


@contextmanager
def start_both(model: Path, plan: Plan, folder: Path) -> Iterator[tuple[Server, list[Contestant]]]:
    params = asks.sampling_params(plan.text_tokens, round(CODES_PER_SECOND * plan.speech_seconds) + 1)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in VLLM_ARGS.items()]
    # The server counts what it does, as it does by default: so the direct call does, too.
    llm_args = {**VLLM_ARGS, "enforce_eager": True, "log_stats": True}
    with ExitStack() as stack:
        server = stack.enter_context(start_server(model, [*flags, "--enforce-eager"], folder / "server.log"))
        prompts = asks.make_prompts(model, plan.num_questions)
        requests = asks.make_requests(plan.num_questions, params)
        yield (
            server,
            [
                stack.enter_context(http_contestant(SERVER, server, requests)),
                stack.enter_context(direct_contestant(DIRECT, model, llm_args, prompts, params)),
            ],
        )


def measure(loads: list[Load], contestants: list[Contestant], rounds: int, tallies: Tallies) -> None:
    """All loads, in every round by everybody, who begins in turn."""
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}: " + ", ".join(f"{load.endpoint} {load.name}" for load in loads))
        for load in loads:
            for contestant in contestants[:: -1 if number % 2 else 1]:
                tallies[contestant.name, load].sessions.append(contestant.run(load))


def play(size: str, plan: Plan, args: Namespace, report: Report) -> None:
    """One checkpoint of the speaking model."""
    label = OMNI if size == "default" else f"{OMNI}_{size}"
    tallies: Tallies = defaultdict(Tally)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_checkpoint(OMNI, Path(folder) / "model", size=size)
        progress(f"{label}: starting the server and the program")
        with start_both(model, plan, Path(folder)) as (server, both):
            for endpoint in [name for name in plan.endpoints if name != "images"]:
                who = both if endpoint != "speech" else both[:1]  # what is spoken there, a prompt cannot say
                measure_endpoint(endpoint, who, plan, tallies)
            if "chat" in plan.endpoints:
                count_streams(label, both, report)
            if args.vllm_bench:
                figures = vllm_bench.run(server.port, model, quick=args.quick)
                report.notes.append(f"{label}, vllm bench serve: {figures}")
    add_rows(label, tallies, report)
    add_ratios("" if size == "default" else f"_{size}", tallies, report)


def measure_endpoint(endpoint: str, who: list[Contestant], plan: Plan, tallies: Tallies) -> None:
    loads = plan.closed(endpoint)
    measure(loads, who, 1, defaultdict(Tally))  # to warm up
    measure(loads, who, plan.rounds, tallies)
    most = max(tallies[who[-1].name, load].requests_per_second for load in loads)
    measure(plan.opened(endpoint, most), who, plan.rounds, tallies)


def count_streams(label: str, both: list[Contestant], report: Report) -> None:
    """How many of so many streams of speech at once are complete and say what the direct call says to one caller alone.

    Alone, both say the same to the last bit, or this fails. In a crowd sums are rounded in another order.

    Raises:
        ValueError: A question asked alone was answered differently.
    """
    alone, direct = (who.run(Load("chat", STREAMS, concurrency=1, keeps_speech=True)).answers for who in both)
    if any(answer.error or answer.difference(other) for answer, other in zip(alone, direct, strict=True)):
        raise ValueError(f"{label}: over HTTP, a question is answered differently")
    served = both[0].run(Load("chat", STREAMS, concurrency=STREAMS, keeps_speech=True)).answers
    apart = [inf if answer.error else answer.difference(other) for answer, other in zip(served, direct, strict=True)]
    right = [difference for difference in apart if difference <= MAX_ROUNDING]
    report.notes += [f"{label}: a stream failed: {answer.error}" for answer in served if answer.error]
    report.notes.append(f"{label}: samples of {STREAMS} streams at once differ by {max(right, default=0):g} at most")
    report.ratios["streams_complete"] = min(report.ratios.get("streams_complete", STREAMS), len(right))


def play_images(plan: Plan, report: Report) -> None:
    """A model that paints; there is nothing to stream."""
    tallies: Tallies = defaultdict(Tally)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_checkpoint(PAINTER, Path(folder) / "model")
        progress(f"{PAINTER}: starting the server")
        with start_server(model, ["--dtype=float32"], Path(folder) / "server.log") as server:
            requests = asks.make_image_requests(plan.num_questions)
            with http_contestant(SERVER, server, requests) as contestant:
                measure_endpoint("images", [contestant], plan, tallies)
    add_rows(PAINTER, tallies, report)


def add_rows(model: str, tallies: Tallies, report: Report) -> None:
    for (who, load), tally in tallies.items():
        loop = "closed" if load.concurrency else "open"
        named = {"model": model, "endpoint": load.endpoint, "loop": loop, "load": load.concurrency or load.rate}
        report.rows.append({**named, "who": who, **tally.row()})


def add_ratios(suffix: str, tallies: Tallies, report: Report) -> None:
    """By concurrency, and the worst of those as the ratio that has no concurrency in its name."""
    throughputs, added = {}, {}
    for load in [load for _, load in tallies if load.concurrency and load.endpoint in ("chat", "text")]:
        ours, direct = tallies[SERVER, load], tallies[DIRECT, load]
        name = load.name if load.endpoint == "chat" else f"{load.endpoint}_{load.name}"
        ratio = ours.requests_per_second / direct.requests_per_second
        report.ratios[f"http_throughput_{name}{suffix}"] = ratio
        if load.endpoint == "chat":
            throughputs[load.concurrency] = ratio
            added[load.concurrency] = 1000 * (ours.median_first_audio() - direct.median_first_audio())
            report.ratios[f"http_ttfa_added_ms_{name}{suffix}"] = added[load.concurrency]
    if throughputs:
        report.ratios[f"http_throughput{suffix}"] = min(throughputs.values())
        few = [value for concurrency, value in added.items() if concurrency <= TTFA_CONCURRENCY]
        report.ratios[f"http_ttfa_added_ms{suffix}"] = max(few or added.values())


def make_plan(args: Namespace) -> Plan:
    if args.quick:
        return Plan(args.endpoints, args.concurrency or [1, 8], args.rates or [0.5], 1, 6, 12, 2.0, 12)
    rounds = args.rounds or 5
    return Plan(
        args.endpoints, args.concurrency or [1, 8, 64], args.rates or [0.25, 0.5, 0.9], rounds, 12, 24, 10.0, 40
    )


def make_arguments() -> Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=["default", "large"], help="default: both; --quick: default")
    parser.add_argument("--endpoints", nargs="+", choices=list(asks.ENDPOINTS), default=list(asks.ENDPOINTS))
    parser.add_argument("--concurrency", type=int, nargs="+", help="callers in closed loops (default 1 8 64)")
    parser.add_argument("--rates", type=float, nargs="+", help="shares of the most that is possible, in open loops")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--vllm-bench", action="store_true", help="also run `vllm bench serve` against the text")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write latency against load as PNG files")
    args = parser.parse_args()
    args.sizes = args.sizes or (["default"] if args.quick else ["default", "large"])
    return args


def main() -> None:
    args = make_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    plan = make_plan(args)
    report = Report("serve", {"quick": str(args.quick), "speech": f"{plan.speech_seconds:g} s", "rounds": plan.rounds})
    if set(plan.endpoints) != {"images"}:
        for size in args.sizes:
            play(size, plan, args, report)
    if "images" in plan.endpoints:
        play_images(plan, report)
    report.notes += [
        "http_throughput: requests/s of the server over those of the direct call (higher is better)",
        "http_ttfa_added_ms: median TTFA of the server less that of the direct call (lower is better)",
        f"streams_complete: of {STREAMS} streams at once, those that say what the direct call says alone",
        "the client of the server uses cores, too; the caller of the direct call is in the program",
    ]
    if args.plots:
        plots.plot(report.rows, args.plots)
    report.finish(args.output)


if __name__ == "__main__":
    main()
