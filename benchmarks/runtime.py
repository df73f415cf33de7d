# SPDX-License-Identifier: Apache-2.0
"""What the runtime costs: hops, function stages, idle pipelines, starts, and a storm of aborts.

    python benchmarks/runtime.py [--only hop start ...] [--output FILE.json] [--quick]

Each is measured beside its baseline in the same run. The notes below the table explain each ratio and which way is
better; most are costs, so that, unlike in the other benchmarks, less is better.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
import zmq
from report import Report, make_parser, parse, percentile, progress, tiny_checkpoint

from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.events import ErrorEvent
from vllm_omni.inputs import OmniPrompt
from vllm_omni.testing.media import make_prompt

MB = 1 << 20
PAYLOADS = {"1mb": MB, "64mb": 64 * MB}
MESSAGE = b"x" * 128
CALIBRATION_S = 3.0
CONCURRENCY = 16
ABORTED_SHARE = 0.2
OMNI_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 * MB,  # small, so that all of it was written to before memory is measured
}
SHORT_RESULT: list[Any] = [{"max_tokens": 4}, {"max_tokens": 8, "detokenize": False}, None]
"""Sampling parameters of the three stages of Qwen3-Omni."""
ECHO = """
import sys, zmq
with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
    pull.bind(sys.argv[1] + "/forth.sock")
    push.connect(sys.argv[1] + "/back.sock")
    while True:
        push.send(pull.recv())
"""
"""Sends messages back, over PUSH and PULL sockets on `ipc://` as between stages."""
START = """
import sys
kind, *paths = sys.argv[1:]
if kind == "vllm.LLM":
    from vllm import LLM as Engine
else:
    from vllm_omni import OmniLLM as Engine
args = dict(dtype="float32", max_model_len=1024, max_num_seqs=8, enforce_eager=True, kv_cache_memory_bytes=256 << 20)
if __name__ == "__main__":
    engine = Engine(*paths, **args)
    print("ready", flush=True)
    if kind != "vllm.LLM":
        engine.close()
"""


def open_chain(
    directory: Path, functions: list[str], runtimes: Sequence[dict[str, Any]] = (), **runtime: Any
) -> OmniLLM:
    """The pipeline of `write_chain`."""
    return OmniLLM("", str(write_chain(directory, functions, runtimes, **runtime)))


def write_chain(directory: Path, functions: list[str], runtimes: Sequence[dict[str, Any]] = (), **runtime: Any) -> Path:
    """A pipeline of function stages, each reading the one before; the last one's text is the output.

    Args:
        runtimes: The `runtime` of each stage.
        runtime: That of the pipeline.

    Returns:
        Its stage configuration.
    """
    runtimes = runtimes or [{}] * len(functions)
    stages: list[dict[str, Any]] = [
        {
            "stage_id": stage_id,
            "engine_type": "function",
            "function": f"runtime_stages.{function}",
            "engine_args": {"model_stage": f"{function}{stage_id}"},
            "engine_input_source": [stage_id - 1] if stage_id else [],
            "runtime": runtimes[stage_id],
        }
        for stage_id, function in enumerate(functions)
    ]
    stages[-1] |= {"final_output": True, "final_output_type": "text"}
    path = directory / f"{'-'.join(functions)}.yaml"
    path.write_text(json.dumps({"stage_args": stages, "runtime": runtime}))  # JSON is YAML
    return path


@contextmanager
def round_trips(directory: Path) -> Iterator[Callable[[], float]]:
    """A function that gives the seconds of one ZMQ round trip to another process."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind(f"ipc://{directory}/back.sock")
        push.connect(f"ipc://{directory}/forth.sock")
        push.linger = 0
        process = subprocess.Popen([sys.executable, "-c", ECHO, f"ipc://{directory}"])

        def once() -> float:
            started = time.monotonic()
            push.send(MESSAGE)
            pull.recv()
            return time.monotonic() - started

        with process:
            try:
                yield once
            finally:
                process.kill()


def time_of_copying(source: torch.Tensor, target: torch.Tensor) -> float:
    started = time.monotonic()
    target.copy_(source)
    return time.monotonic() - started


def measure_hops(report: Report, quick: bool) -> None:
    """Adds `hop_small` (hop to round trip: below is better), `hop_small_p99`, and rates, hop to copy, of `PAYLOADS`."""
    rounds, count = (4, 100) if quick else (10, 300)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        progress("hop: starting")
        with round_trips(directory) as round_trip, open_chain(directory, ["send", "receive"]) as llm:
            progress("hop: small messages")
            _in_turns(round_trip, lambda: _hop(llm, 0), 0, count)  # to warm up
            # One by one, so that the threads of both have slept as long: in a loop a round trip takes 0.6 of its time.
            bare, ours = _in_turns(round_trip, lambda: _hop(llm, 0), rounds * count, 1)
            report.add_values("hop: ZMQ round trip", [1000 * seconds for seconds in bare], "ms")
            report.add_values("hop: small message", [1000 * seconds for seconds in ours], "ms")
            report.ratios["hop_small"] = percentile(ours, 50) / percentile(bare, 50)
            report.ratios["hop_small_p99"] = percentile(ours, 99) / percentile(ours, 50)
            for label, num_bytes in PAYLOADS.items():
                progress(f"hop: {label}")
                source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
                bare, ours = _in_turns(
                    lambda: time_of_copying(source, target),  # noqa: B023
                    lambda: _hop(llm, num_bytes),  # noqa: B023
                    rounds,
                    max(8, count // 10),
                )
                report.add_values(f"hop: memory copy, {label}", [num_bytes / MB / seconds for seconds in bare], "MB/s")
                report.add_values(f"hop: {label}", [num_bytes / MB / seconds for seconds in ours], "MB/s")
                report.ratios[f"hop_{label}"] = percentile(bare, 50) / percentile(ours, 50)
    report.notes += [
        "a hop is from the end of one stage's function to the start of the next one's, in an idle pipeline; with a "
        "payload, the time that its first read takes longer than a second one is part of the hop",
        "hop_small: hop to ZMQ round trip (PUSH and PULL over ipc, two processes), in turns one by one, so that the "
        "threads of both have slept as long; target below 2.5",
        "hop_small_p99: 99th percentile of the small hops to their median, target below 4",
        "hop_1mb, hop_64mb: bytes per second of the hop to those of a copy (torch, one process, both sides in memory "
        "that was in use before), target above 0.4 for 64 MB",
    ]


def _in_turns(
    bare: Callable[[], float], ours: Callable[[], float], rounds: int, count: int
) -> tuple[list[float], list[float]]:
    """Seconds of both; the first round warms up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(1 + rounds):
        for values, once in zip(seconds, (bare, ours), strict=True):
            measured = [once() for _ in range(count)]
            values += measured if number else []
    return seconds


def _hop(llm: OmniLLM, num_bytes: int) -> float:
    prompt: OmniPrompt = {"prompt": "", "additional_information": {"num_bytes": num_bytes}}
    return float(llm.generate(prompt, use_tqdm=False)[0].outputs[0].text)


def measure_throughput(report: Report, quick: bool) -> None:
    """Requests per second through function stages that do nothing. Adds rows only: there is no baseline."""
    rounds, count = (3, 300) if quick else (7, 1000)
    with tempfile.TemporaryDirectory() as name:
        for length in (1, 3):
            progress(f"throughput: {length} stage(s)")
            with open_chain(Path(name), ["nothing"] * length) as llm:
                rates = rates_of(llm, [""] * count, rounds)
            report.add_values(f"throughput: {length} stage(s) that do nothing", rates, "requests/s")


def rates_of(llm: OmniLLM, prompts: list[Any], rounds: int, params: list[Any] | None = None) -> list[float]:
    """Requests per second of each round; the first one, which warms up, is left out."""
    rates = []
    for _ in range(1 + rounds):
        started = time.monotonic()
        llm.generate(prompts, params, use_tqdm=False)
        rates.append(len(prompts) / (time.monotonic() - started))
    return rates[1:]


def measure_idle(report: Report, quick: bool) -> None:
    """Adds `idle_cpu`: CPU time of all the pipeline's processes to wall time; 0.01 is one percent of one core."""
    seconds = 5.0 if quick else 20.0
    with tiny_checkpoint("qwen3_omni_moe") as model:
        progress("idle: starting")
        with OmniLLM(str(model), **OMNI_ARGS) as llm:
            llm.generate(make_prompt(model, "text"), SHORT_RESULT, use_tqdm=False)  # every stage has worked once
            time.sleep(CALIBRATION_S)
            progress(f"idle: measuring for {seconds:g} s")
            before, started = _cpu_seconds(), time.monotonic()
            time.sleep(seconds)
            share = (_cpu_seconds() - before) / (time.monotonic() - started)
    report.add_values("idle: CPU time of three stages", [100 * share], "% of a core")
    report.ratios["idle_cpu"] = share
    report.notes.append("idle_cpu: CPU time of all processes of three vLLM stages to wall time, target below 0.01")


def _processes() -> list[psutil.Process]:
    """This process and all below it."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def _cpu_seconds() -> float:
    times = [process.cpu_times() for process in _processes()]
    return sum(time.user + time.system for time in times)


def measure_start(report: Report, quick: bool) -> None:
    """Adds `start_3_stages` and `start_6_stages`: our time to plain vLLM's; below is better."""
    with tiny_checkpoint("qwen3_omni_moe") as omni, tiny_checkpoint("qwen3") as text:
        commands = {
            "vllm.LLM": ["vllm.LLM", str(text)],
            "3 stages": ["OmniLLM", str(omni)],
            "6 stages": ["OmniLLM", str(omni), str(write_doubled_config(omni.parent))],
        }
        progress("start: warming up the file system's cache")
        time_of_start(commands["3 stages"])
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(1 if quick else 3):
            for name, command in commands.items():
                progress(f"start: {name}, round {number + 1}")
                seconds[name].append(time_of_start(command))
    median = {name: percentile(values, 50) for name, values in seconds.items()}
    for name, values in seconds.items():
        report.add_values(f"start: {name}", values, "s")
    for stages in (3, 6):
        report.ratios[f"start_{stages}_stages"] = median[f"{stages} stages"] / median["vllm.LLM"]
    report.notes += [
        "a start is from the start of a Python process until its engine takes requests, all with the same dtype and KV "
        "cache; vllm.LLM runs a tiny text model, we the tiny Qwen3-Omni, once and twice side by side",
        "start_3_stages, start_6_stages: our time to that of vllm.LLM, target below 0.7 for 3 stages",
    ]


def time_of_start(command: list[str]) -> float:
    """Seconds until the process prints that it is ready. Waits for its end, too."""
    ready: float | None = None
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-c", START, *command]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == "ready":
                    ready = time.monotonic() - started
        if ready is None:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command[3:])} did not start:\n{errors.read()}")
    return ready


def write_doubled_config(directory: Path, name: str = "qwen3_omni_moe") -> Path:
    """The three stages of an omni model twice, side by side."""
    config: dict[str, Any] = yaml.safe_load((stage_configs_dir() / f"{name}.yaml").read_text())
    config["stage_args"] += [
        stage
        | {
            "stage_id": stage["stage_id"] + 3,
            "engine_args": stage["engine_args"] | {"model_stage": f"{stage['engine_args']['model_stage']}_2"},
            "engine_input_source": [source + 3 for source in stage.get("engine_input_source", [])],
        }
        for stage in config["stage_args"]
    ]
    edges = config["runtime"]["edges"]
    edges += [edge | {"from": edge["from"] + 3, "to": edge["to"] + 3} for edge in edges]
    path = directory / "six.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def measure_abort_storm(report: Report, quick: bool) -> None:
    """Adds `rss_after_aborts`: memory of all processes after 2,000 requests, one in five aborted, to that before."""
    warm_up, count = (150, 300) if quick else (600, 2000)
    with tiny_checkpoint("qwen3_omni_moe") as model:
        prompts = [make_prompt(model, "text", seed) for seed in range(32)]
        progress("abort storm: starting")
        with AsyncOmniLLM(str(model), **OMNI_ARGS) as llm:
            progress(f"abort storm: {warm_up} requests to warm up")
            asyncio.run(send_and_abort(llm, prompts, warm_up, random.Random(0)))
            before = _resident_mb()
            progress(f"abort storm: {count} requests")
            ends = asyncio.run(send_and_abort(llm, prompts, count, random.Random(1)))
            after = _resident_mb()
    report.add_values(f"abort storm: memory before {count} requests", [before], "MB")
    report.add_values(f"abort storm: memory after, {ends['aborted']} of them aborted", [after], "MB")
    report.ratios["rss_after_aborts"] = after / before
    report.notes.append("rss_after_aborts: memory after to before, target below 1.05")


async def send_and_abort(llm: AsyncOmniLLM, prompts: list[Any], count: int, rng: random.Random) -> Counter[str]:
    """Sends `count` requests, `CONCURRENCY` at a time. Returns how many ended in which way."""
    numbers, ends = iter(range(count)), Counter[str]()
    durations = deque([1.0], maxlen=CONCURRENCY)  # of the last requests that were completed, in seconds

    async def complete(prompt: Any) -> None:
        async for event in llm.generate(prompt, SHORT_RESULT):
            if isinstance(event, ErrorEvent):
                raise event.error

    async def client() -> None:
        for number in numbers:
            timeout = rng.uniform(0, min(durations)) if rng.random() < ABORTED_SHARE else None
            started = time.monotonic()
            try:
                await asyncio.wait_for(complete(prompts[number % len(prompts)]), timeout)
                durations.append(time.monotonic() - started)
                ends["completed"] += 1
            except TimeoutError:
                ends["aborted"] += 1

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return ends


def _resident_mb() -> float:
    return sum(process.memory_info().rss for process in _processes()) / MB


PARTS: dict[str, Callable[[Report, bool], None]] = {
    "hop": measure_hops,
    "throughput": measure_throughput,
    "idle": measure_idle,
    "start": measure_start,
    "abort-storm": measure_abort_storm,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure; default: all")
    args = parse(parser)
    report = Report("runtime", {"quick": str(args.quick), "parts": " ".join(args.only)})
    for name in args.only:
        PARTS[name](report, args.quick)
    report.finish(args.output)


if __name__ == "__main__":
    main()
