# SPDX-License-Identifier: Apache-2.0
"""What `efficiency.py` runs in other processes: workers that time their model, and stages that run alone.

    python benchmarks/efficiency_stages.py JOB.pickle RESULT.json

runs the stages of a pipeline one after the other, each alone and with its whole input at hand.
"""

import functools
import json
import multiprocessing
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.inputs import StageRequest
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import Error, NewRequest, Outbox, Result
from vllm_omni.worker.cpu_worker import CPUARWorker, CPUGenerationWorker
from vllm_omni.worker.gpu_worker import GPUARWorker, GPUGenerationWorker

CLOCK = "forward_clock"
"""Key of `additional_config`: the file of a stage's `ForwardClock`."""
MODEL_CALLS = ("forward", "compute_logits", "embed_input_ids", "embed_multimodal")
STRATEGY_CALLS = ("begin", "extend", "prompt_rows", "feed_back", "replay")
"""A talker's networks besides its language model: projections of its input, and the depth decoder."""


class ForwardClock:
    """The CPU seconds of the engine's thread inside the model's code, in a file that another process reads."""

    def __init__(self, path: str) -> None:
        self._seconds = np.memmap(path, np.float64, "w+", shape=(1,))
        self._is_running = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)  # Runners look at a forward's parameters.
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return call(*args, **kwargs)
            self._is_running, started = True, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[0] += time.thread_time() - started
                self._is_running = False

        return timed


class TimesForwards(GPUModelRunner):
    """A base before our runner."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        additional: Any = self.vllm_config.additional_config
        clock = ForwardClock(additional[CLOCK])
        for owner, names in ((self.get_model(), MODEL_CALLS), (getattr(self, "strategy", None), STRATEGY_CALLS)):
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, clock.timed(getattr(owner, name)))


def _timed(runner: type[GPUModelRunner]) -> Any:
    return type(f"Timed{runner.__name__}", (TimesForwards, runner), {})


# A GPU computes while the thread goes on: there the time in forwards is that of launching them.
_ARWorker: Any = CPUARWorker if current_platform.is_cpu() else GPUARWorker
_GenerationWorker: Any = CPUGenerationWorker if current_platform.is_cpu() else GPUGenerationWorker


class TimedARWorker(_ARWorker):
    omni_runner_cls = _timed(_ARWorker.omni_runner_cls)
    feedback_runner_cls = _timed(_ARWorker.feedback_runner_cls)


class TimedGenerationWorker(_GenerationWorker):
    omni_runner_cls = _timed(_GenerationWorker.omni_runner_cls)


class Job(NamedTuple):
    """
    Attributes:
        stages: Of the pipeline, in order; each reads those before it.
        requests: For each request the input of each stage, by stage id.
        rounds: The best one counts; one more, before them, warms up.
    """

    model: str
    stages: list[OmniStageConfig]
    requests: list[dict[int, StageRequest]]
    rounds: int


def run_alone(job: Job) -> dict[str, float]:
    """Requests per second of each stage, by its name. Each runs in a process of its own."""
    rates, fork = {}, multiprocessing.get_context("fork")
    outputs: list[dict[int, StageOutput]] = [{} for _ in job.requests]
    for stage in job.stages:
        items = list(_prepare(job, stage, outputs))
        with tempfile.NamedTemporaryFile() as file:
            process = fork.Process(target=_run_stage, args=(job, stage, items, file.name))
            process.start()
            process.join()
            if process.exitcode:
                raise RuntimeError(f"stage {stage.name} alone: its process ended with status {process.exitcode}")
            rates[stage.name], results = pickle.load(file)
        for sources, result in zip(outputs, results, strict=True):
            sources[stage.stage_id] = result
    return rates


def _prepare(job: Job, stage: OmniStageConfig, outputs: list[dict[int, StageOutput]]) -> Iterator[NewRequest]:
    processor = load_stage_input_processor(stage, job.model)
    for requests, sources in zip(job.requests, outputs, strict=True):
        request = requests[stage.stage_id]
        read = {source: sources[source] for source in stage.engine_input_source}
        yield NewRequest(request, None if processor is None else processor.process(request, read))


def _run_stage(job: Job, stage: OmniStageConfig, items: list[NewRequest], path: str) -> None:
    """Writes the requests per second of the best round, and the outputs."""
    engine = stage.kind.make_engine(job.model, outbox := Outbox())
    engine.start()
    seconds = []
    for _ in range(1 + job.rounds):
        started = time.monotonic()
        for item in items:
            engine.inbox.put(item)
        results: dict[str, StageOutput] = {}
        while len(results) < len(items):
            engine.wait_for_work()
            engine.step()
            results |= dict(map(_as_result, outbox.take_all()))
        seconds.append(time.monotonic() - started)
    ordered = [results[item.request_id] for item in items]
    Path(path).write_bytes(pickle.dumps((len(items) / min(seconds[1:]), ordered)))


def _as_result(item: Any) -> tuple[str, StageOutput]:
    if isinstance(item, Error):
        raise RuntimeError(item.traceback)
    assert isinstance(item, Result), item
    item.output.is_last = True
    return item.request_id, item.output


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run_alone(pickle.loads(Path(sys.argv[1]).read_bytes()))))
