# SPDX-License-Identifier: Apache-2.0
"""What the pipeline costs: a text model in vllm_omni and in plain vLLM, served over HTTP and offline, in one run.

    python benchmarks/versus_vllm.py [--parts serve offline] [--model DIR] [--size default large] [--eager]
                                     [--async-scheduling | --no-async-scheduling] [--concurrency 1 16 64]
                                     [--rounds N] [--output FILE.json] [--quick]

`serve`: `vllm serve --omni` and plain vLLM's server, each as it comes, under the load of `vllm bench serve`: random
prompts, greedy, of equal length. The servers take turns, round by round; an idle one costs no time. Figures are the
median of the rounds. `offline`: `OmniLLM` and `vllm.LLM` on the same batch, in turns, and all tokens are compared.
Plain vLLM runs twice there: with its engine in a process of its own, which is its default, and inside this process,
where no message is sent at all.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from report import Report, make_parser, percentile, progress
from serve import Plan, Server, Target, omni_server, plain_server, run_server
from transformers.utils import logging
from vllm import LLM, SamplingParams

from vllm_omni import OmniLLM
from vllm_omni.testing.media import make_prompt
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

OURS, PLAIN, INSIDE = "vllm_omni", "vLLM", "vLLM, in this process"
BATCH = 32
ENGINE_ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE_ARGS.items()]
COLUMNS = {
    "requests/s": "request_throughput",
    "TTFT p50 ms": "median_ttft_ms",
    "TTFT p99 ms": "p99_ttft_ms",
    "ITL p50 ms": "median_itl_ms",
    "TPOT p50 ms": "median_tpot_ms",
    "CPU s/request": "cpu_per_request",
    "failed": "failed",
}
"""Headings, and the keys of a round's result."""
RATIOS = {
    "throughput": "request_throughput",
    "cpu_per_request": "cpu_per_request",
    "ttft_p50": "median_ttft_ms",
    "itl_p50": "median_itl_ms",
    "tpot_p50": "median_tpot_ms",
}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants so far, those that have ended included."""
    root = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:4]) for process in [root, *root.children(recursive=True)])


@dataclass(frozen=True)
class MeasuredServer:
    """A server, and the load generator's view of it."""

    server: Server
    target: Target

    def run(self, plan: Plan, concurrency: int) -> dict[str, Any]:
        """The result of `vllm bench serve`, and the CPU time of the server for each request."""
        before = cpu_seconds(self.server.pid)
        result = self.target.run(plan, concurrency, {})
        used = cpu_seconds(self.server.pid) - before
        return result | {"cpu_per_request": used / max(result["completed"], 1)}


def measure_servers(model: Path, flags: list[str], plan: Plan, report: Report) -> None:
    """Adds a row for each server and concurrency, and the ratios of ours to plain vLLM's."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for name, command in {OURS: omni_server(model, *flags), PLAIN: plain_server(model, *flags)}.items():
            progress(f"starting {name}")
            server = stack.enter_context(run_server(command, folder))
            servers[name] = MeasuredServer(server, Target(name, "openai-chat", server.url, model))
        for concurrency in plan.concurrencies:
            for name, measured in servers.items():
                progress(f"warming up {name}")
                measured.run(plan, concurrency)
            _add_figures(report, concurrency, _take_turns(servers, plan, concurrency))


def _take_turns(servers: dict[str, MeasuredServer], plan: Plan, concurrency: int) -> dict[str, dict[str, Any]]:
    """The medians of all rounds, by server."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for number in range(plan.rounds):
        progress(f"{concurrency} callers, round {number + 1} of {plan.rounds}")
        for name in list(servers)[:: -1 if number % 2 else 1]:
            results[name].append(servers[name].run(plan, concurrency))
    return {
        name: {key: statistics.median(result[key] for result in rounds) for key in COLUMNS.values()}
        for name, rounds in results.items()
    }


def _add_figures(report: Report, concurrency: int, medians: dict[str, dict[str, Any]]) -> None:
    for name, median in medians.items():
        figures = {heading: median[key] for heading, key in COLUMNS.items()}
        report.rows.append({"part": "serve", "callers": concurrency, "backend": name, **figures})
    for name, key in RATIOS.items():
        report.ratios[f"{name}_c{concurrency}"] = medians[OURS][key] / medians[PLAIN][key]


class Backend:
    """Generates the batch, and keeps the rates."""

    def __init__(self, name: str, generate: Callable[[list[Any]], list[Any]]) -> None:
        self.name = name
        self._generate = generate
        self.rates: list[float] = []
        self.token_ids: list[list[int]] = []

    def run(self, prompts: list[Any]) -> None:
        started = time.perf_counter()
        outputs = self._generate(prompts)
        seconds = time.perf_counter() - started
        self.token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        self.rates.append(len(prompts) / seconds)


def measure_offline(model: Path, engine_args: dict[str, Any], tokens: int, rounds: int, report: Report) -> None:
    """Adds a row for each backend; the first round of each warms up and is not counted."""
    prompts = [make_prompt(model, "text", seed) for seed in range(BATCH)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    progress("starting the offline engines")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(OmniLLM, str(model), **engine_args)
        plain = LLM(model=str(model), **engine_args)
    with starting.result() as omni:
        inside = _llm_in_this_process(model, engine_args)
        backends = [
            Backend(OURS, lambda batch: omni.generate(batch, [params], use_tqdm=False)),
            Backend(PLAIN, lambda batch: plain.generate(batch, params, use_tqdm=False)),
            Backend(INSIDE, lambda batch: inside.generate(batch, params, use_tqdm=False)),
        ]
        for number in range(1 + rounds):
            progress(f"offline: round {number} of {rounds}" if number else "offline: warming up")
            for backend in backends:
                backend.run(prompts)
    if any(backend.token_ids != backends[0].token_ids for backend in backends):
        sys.exit("not comparable: different tokens")
    _add_rates(report, {backend.name: percentile(backend.rates[1:], 50) for backend in backends})


def _add_rates(report: Report, rates: dict[str, float]) -> None:
    for name, rate in rates.items():
        others = dict.fromkeys(list(COLUMNS)[1:], "")
        report.rows.append({"part": "offline", "callers": BATCH, "backend": name, "requests/s": rate, **others})
    report.ratios["offline"] = rates[OURS] / rates[PLAIN]
    report.ratios["offline_to_in_process"] = rates[OURS] / rates[INSIDE]


def _llm_in_this_process(model: Path, engine_args: dict[str, Any]) -> LLM:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read while the engine is constructed
    try:
        return LLM(model=str(model), **engine_args)
    finally:
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]


def main() -> None:
    parser = make_parser(__doc__)
    parts = ["serve", "offline"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: both")
    parser.add_argument("--model", type=Path, help="a text model; default: a tiny one with random weights")
    parser.add_argument("--size", choices=["default", "large"], default="default", help="of the tiny model")
    parser.add_argument("--eager", action="store_true", help="both without compilation")
    parser.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction, help="of both (default: as each comes)"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64], help="default 1 16 64")
    parser.add_argument("--rounds", type=int, help="default 5; 2 with --quick")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rounds = args.rounds or (2 if args.quick else 5)
    plan = Plan(args.concurrency, rounds, min_requests=16, text_tokens=64, speech_seconds=0.0)
    engine_args = {"enforce_eager": True} if args.eager else {}
    if args.async_scheduling is not None:
        engine_args["async_scheduling"] = args.async_scheduling
    report = Report("versus_vllm", {"size": args.size, "rounds": rounds, **{k: str(v) for k, v in engine_args.items()}})
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_tiny_checkpoint("qwen3", folder, size=args.size)
        if "serve" in args.parts:
            flags = [f"--{'' if value else 'no-'}{name.replace('_', '-')}" for name, value in engine_args.items()]
            measure_servers(model, [*FLAGS, *flags], plan, report)
        if "offline" in args.parts:
            measure_offline(model, ENGINE_ARGS | engine_args, 128, 2 * rounds, report)
    report.notes += [
        "ratios are ours to plain vLLM's, of the medians; for throughput and offline higher is better, else lower",
        "CPU s/request: of all processes of the server; offline: all tokens were equal",
    ]
    report.finish(args.output)


if __name__ == "__main__":
    main()
