# SPDX-License-Identifier: Apache-2.0
"""A part of `streaming.py`: how much of a pipeline's work is the model's, and the pipeline with its slowest stage.

`forward_share`: the CPU time of the stages' engines inside their models (forward, encoders, logits, a talker's depth
decoder) to the CPU time of all processes, the caller's included, while `--concurrency` clients send prompts (text,
image, audio and video in turn), each the next one when its last one is answered. `of_slowest_stage`: the pipeline's
requests per second to those of its slowest stage, which runs alone with its whole input at hand; both have all requests
at once, of text, and compute 8 at a time. `of_bound`: the same, where the cores limit the pipeline before that stage
does, to that limit: all cores in forwards. All again with twice the requests, lengths and stages (side by side: a
request passes all). Weights are random; one thread for each engine.
"""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import efficiency_stages
import msgspec
import numpy as np
import psutil
from backends import sampling_params
from efficiency_stages import CLOCK, Job, TimedARWorker, TimedGenerationWorker
from report import Report, progress, tiny_checkpoint
from runtime import write_doubled_config

from vllm_omni import AsyncOmniLLM
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.events import ErrorEvent
from vllm_omni.inputs import OmniPrompt
from vllm_omni.testing.media import make_prompt, mixed_prompts

BATCH = 8
"""Requests that a stage computes at a time, where it is compared with itself alone."""
ENGINE_ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "enable_prefix_caching": False}
WORKERS = {
    kind: f"{worker.__module__}.{worker.__name__}"
    for kind, worker in {"AR": TimedARWorker, "generation": TimedGenerationWorker}.items()
}
CALLER = "caller"
MAIN_CHECKPOINT = "qwen3_omni_moe"
"""Whose ratios have no prefix."""

Prompts = Sequence[OmniPrompt]


@dataclass(frozen=True)
class Load:
    """
    Attributes:
        waves: Requests for each client.
        requests: For the comparison with the slowest stage, all at once.
        text_tokens, talker_tokens: Length of every result.
        rounds: Of the comparison; the best one counts.
    """

    waves: int
    requests: int
    text_tokens: int
    talker_tokens: int
    rounds: int


@dataclass(frozen=True)
class Account:
    """CPU seconds of one process.

    Attributes:
        forwards: In the model; 0 in the caller's process.
        engine: Of the thread that runs the engine, without `forwards`; of the main thread in the caller's process.
        others: Of all other threads.
    """

    forwards: float
    engine: float
    others: float

    def __sub__(self, other: "Account") -> "Account":
        return Account(self.forwards - other.forwards, self.engine - other.engine, self.others - other.others)

    @property
    def total(self) -> float:
        return self.forwards + self.engine + self.others


Accounts = dict[str, Account]
"""By the name of the process: of the stage, or `CALLER`."""


class Pipeline:
    """A pipeline whose stages time their forwards."""

    def __init__(
        self, model: Path, llm: AsyncOmniLLM, clocks: dict[str, Path], others: Collection[psutil.Process]
    ) -> None:
        """`others`: Child processes that are not the pipeline's."""
        self._model = model
        self._llm = llm
        self._clocks = clocks
        self._others = others

    def run(self, prompts: Prompts, load: Load, clients: int) -> tuple[float, Accounts]:
        """Requests per second, and the account of each process."""
        before, started = self._accounts(), time.monotonic()
        asyncio.run(self._send(prompts, self._params(load), clients))
        seconds = time.monotonic() - started
        return len(prompts) / seconds, {name: account - before[name] for name, account in self._accounts().items()}

    def job(self, prompts: Prompts, load: Load) -> Job:
        """The same requests, for stages that run alone."""
        config = self._llm.config
        stages = [
            msgspec.structs.replace(stage, engine_args=_untimed(stage.engine_args)) for stage in config.stage_args
        ]
        requests = [self._llm.builder.build(prompt, self._params(load), print).stages for prompt in prompts]
        return Job(str(self._model), stages, requests, load.rounds)

    def _params(self, load: Load) -> list[Any]:
        params = sampling_params(load.text_tokens, load.talker_tokens)
        return params * (len(self._clocks) // len(params))

    async def _send(self, prompts: Prompts, params: list[Any], clients: int) -> None:
        waiting = iter(prompts)

        async def client() -> None:
            for prompt in waiting:
                async for event in self._llm.generate(prompt, params, stream=False):
                    if isinstance(event, ErrorEvent):
                        raise event.error

        await asyncio.gather(*(client() for _ in range(clients)))

    def _accounts(self) -> Accounts:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        named = {_name(process): process for process in processes if process not in self._others}
        return {name: self._account(name, process) for name, process in named.items()}

    def _account(self, name: str, process: psutil.Process) -> Account:
        main = _main_thread_seconds(process.pid)
        total = _process_seconds(process.pid)
        forwards = float(np.memmap(self._clocks[name], np.float64, "r")[0]) if name in self._clocks else 0.0
        return Account(forwards, main - forwards, total - main)


def _process_seconds(pid: int) -> float:
    """CPU time of a process, threads that have ended included, by Linux's clock of it: psutil counts ticks of 10 ms."""
    return time.clock_gettime(~pid << 3 | 2)


def _main_thread_seconds(pid: int) -> float:
    nanoseconds, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split(maxsplit=1)
    return int(nanoseconds) / 1e9


def _name(process: psutil.Process) -> str:
    """A stage's name, which is in its process's title."""
    return CALLER if process.pid == os.getpid() else process.cmdline()[0].rpartition("::")[2]


def _untimed(engine_args: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in engine_args.items() if name not in ("worker_cls", "additional_config")}


@contextmanager
def open_pipeline(model: Path, config: Path, max_num_seqs: int) -> Iterator[Pipeline]:
    with tempfile.TemporaryDirectory() as folder:
        stages = load_pipeline_config(config).stage_args
        clocks = {stage.name: Path(folder, stage.name) for stage in stages}
        overrides = {
            stage.name: {"worker_cls": WORKERS[stage.kind.name], "additional_config": {CLOCK: str(clocks[stage.name])}}
            for stage in stages
        }
        args = {**ENGINE_ARGS, "max_num_seqs": max_num_seqs, "stage_overrides": overrides}
        others = psutil.Process().children(recursive=True)
        with AsyncOmniLLM(str(model), str(config), **args) as llm:
            yield Pipeline(model, llm, clocks, others)


def run_alone(job: Job) -> dict[str, float]:
    """Requests per second of each stage, in a process without a pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "job.pickle"), Path(folder, "rates.json")
        paths[0].write_bytes(pickle.dumps(job))
        subprocess.run([sys.executable, efficiency_stages.__file__, *map(str, paths)], check=True)
        return json.loads(paths[1].read_text())


@dataclass(frozen=True)
class Subject:
    """A checkpoint in one size, and the names of its ratios."""

    checkpoint: str
    size: str
    model: Path

    @property
    def label(self) -> str:
        return f"{self.checkpoint}, {self.size}"

    def ratio(self, name: str) -> str:
        prefix = "" if self.checkpoint == MAIN_CHECKPOINT else f"{self.checkpoint}_"
        return prefix + name + ("" if self.size == "default" else f"_{self.size}")


def measure_shares(subject: Subject, load: Load, concurrencies: list[int], report: Report) -> None:
    """Adds `forward_share_c*`, and a row for each process."""
    config = stage_configs_dir() / f"{subject.checkpoint}.yaml"
    with open_pipeline(subject.model, config, max(concurrencies)) as pipeline:
        for clients in concurrencies:
            progress(f"{subject.label}: {clients} clients")
            pipeline.run(mixed_prompts(subject.model, clients, seed=1000), load, clients)
            prompts = mixed_prompts(subject.model, load.waves * max(4, clients))
            rate, accounts = pipeline.run(prompts, load, clients)
            share = add_accounts(report, f"{subject.label}, {clients} clients", rate, len(prompts), accounts)
            report.ratios[subject.ratio(f"forward_share_c{clients}")] = share


def measure_slowest_stage(subject: Subject, load: Load, report: Report) -> None:
    """Adds `of_slowest_stage` and its share of forwards: as it is, and with twice of everything."""
    config = stage_configs_dir() / f"{subject.checkpoint}.yaml"
    double_length = replace(load, text_tokens=2 * load.text_tokens, talker_tokens=2 * load.talker_tokens - 1)
    with tempfile.TemporaryDirectory() as folder:
        doubled = write_doubled_config(Path(folder), subject.checkpoint)
        for name, case, stages in (
            ("", load, config),
            ("_2x_requests", replace(load, requests=2 * load.requests), config),
            ("_2x_lengths", double_length, config),
            ("_2x_stages", load, doubled),
        ):
            progress(f"{subject.label}: against its slowest stage{name.replace('_', ' ')}")
            ratios = _against_slowest(subject, case, stages, name, report)
            report.ratios |= {subject.ratio(f"{key}{name}"): value for key, value in ratios.items()}


def _against_slowest(subject: Subject, load: Load, config: Path, name: str, report: Report) -> dict[str, float]:
    prompts = [make_prompt(subject.model, "text", seed) for seed in range(load.requests)]
    with open_pipeline(subject.model, config, BATCH) as pipeline:
        job = pipeline.job(prompts, load)
        pipeline.run(prompts, load, len(prompts))
        runs = [pipeline.run(prompts, load, len(prompts)) for _ in range(load.rounds)]
    rates = run_alone(job)
    rate, accounts = max(runs, key=lambda run: run[0])
    cores = len(os.sched_getaffinity(0)) * len(prompts) / sum(account.forwards for account in accounts.values())
    share = add_accounts(report, f"{subject.label}{name}", rate, len(prompts), accounts)
    report.notes.append(
        f"{subject.label}{name}: {rate:.3g} requests/s; alone "
        + ", ".join(f"{stage} {value:.3g}" for stage, value in rates.items())
        + f"; the cores, with nothing but forwards, {cores:.3g}"
    )
    slowest = min(rates.values())
    return {"forward_share": share, "of_slowest_stage": rate / slowest, "of_bound": rate / min(slowest, cores)}


def add_accounts(report: Report, case: str, rate: float, count: int, accounts: Accounts) -> float:
    """Adds a row for each process, in milliseconds of CPU time for each request. Returns the share of forwards."""
    total = sum(account.total for account in accounts.values())
    for name, account in accounts.items():
        if account.total > 0.002 * total:  # The fork server is idle.
            parts = {"forwards": account.forwards, "engine": account.engine, "others": account.others}
            milliseconds = {f"{part} ms": 1000 * seconds / count for part, seconds in parts.items()}
            row: dict[str, str | float] = {"case": case, "requests/s": rate, "process": name, **milliseconds}
            report.rows.append({**row, "% of all": 100 * account.total / total})
    return sum(account.forwards for account in accounts.values()) / total


def measure(args: Namespace) -> Report:
    os.environ["OMP_NUM_THREADS"] = "1"  # Of the stages' processes: an engine's forwards are on one thread.
    load = Load(waves=2, requests=32, text_tokens=24, talker_tokens=65, rounds=3)
    if args.quick:
        load = Load(waves=1, requests=16, text_tokens=16, talker_tokens=33, rounds=1)
    concurrencies = args.concurrency or ([8] if args.quick else [1, 8, 32])
    report = Report("efficiency", {"quick": str(args.quick)})
    for checkpoint in args.models:
        for size in args.sizes or (("large",) if args.quick else ("default", "large")):
            with tiny_checkpoint(checkpoint, size) as model:
                subject = Subject(checkpoint, size, model)
                measure_shares(subject, load, concurrencies, report)
                measure_slowest_stage(subject, load, report)
    report.notes += [
        "forwards: CPU time of the engine's thread in the model; engine: the rest of that thread's; others: of the "
        "process's other threads, above all its IO thread; all in milliseconds for each request",
        "forward_share: all forwards to the CPU time of all processes, target at 8 clients and the large size 0.75",
        "of_slowest_stage: requests per second to those of the slowest stage alone, target 0.9",
        "of_bound: the same to the lesser of that and of what the cores compute with nothing but forwards",
    ]
    return report
