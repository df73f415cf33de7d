# SPDX-License-Identifier: Apache-2.0
"""Schedules the jobs of a diffusion stage: which run, and which are computed together next. It knows no pipeline."""

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.core.urgency import Urgency
from vllm_omni.diffusion.batched_call import find_joinable
from vllm_omni.diffusion.job import DiffusionJob, JobEnd, RunningJob
from vllm_omni.worker.gpu_diffusion_model_runner import DiffusionModelRunner
from vllm_omni.worker.gpu_diffusion_worker import DiffusionGPUWorker

_DEFAULT_MAX_BATCH_SIZE = 4
_WITH_CACHE = 2
"""A long job, and those that pass it: each has a cache, as large as the denoiser's activations."""


class DiffusersPipelineExecutor:
    """Runs up to `max_batch_size` concurrent jobs.

    A job joins the others at their next step and leaves when it ends: no job waits for a batch to end. Between two
    module calls a long job yields to a short one, and a request with many outputs to others (see `_order` and
    `_next_waiting`).

    Attributes:
        max_batch_size: The most concurrent jobs.
        runner: Of the loaded pipeline; set by `start`, and by what `load_beside` returns.
        on_shape: Called before jobs are computed; calls of equal shape run the same kernels.
    """

    def __init__(self, model: str, config: DiTConfig, memory: float | int | None = None) -> None:
        """`memory`: its share of an accelerator's memory: a fraction, or bytes; None: all."""
        default = _DEFAULT_MAX_BATCH_SIZE if config.cache_backend is None else _WITH_CACHE
        # Concurrent jobs at different components would move an offloaded pipeline's components back and forth, and
        # compiled code is made for the one object that holds a cache's state.
        is_serial = config.offload == "model" or (config.cache_backend is not None and config.compile)
        self.max_batch_size = config.max_batch_size or (1 if is_serial else default)
        self.on_shape: Callable[[Hashable], None] = lambda shape: None
        self._config, self._memory = config, memory
        self._worker = DiffusionGPUWorker(model, config, memory)
        self.runner: DiffusionModelRunner
        self._waiting: deque[DiffusionJob] = deque()
        self._ended: list[JobEnd] = []  # before their first module call
        self._last_started = ""  # the request of the job that was started last

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Loads the pipeline. Arguments and errors are those of `DiffusionGPUWorker.load_model`."""
        self._worker.init_device()
        self.runner = self._worker.load_model(on_failure)

    def load_beside(self, model: str) -> Callable[[], None]:
        """Loads another checkpoint of the same kind beside the first one, on the same device.

        Returns:
            Computes the next jobs with it; called while no job runs.

        Raises:
            ValueError: The denoiser runs in other processes, too, or the pipeline's memory is not its own.
            StageConfigError: The checkpoint cannot be loaded.
        """
        if self._config.world_size > 1 or self._config.offload:
            raise ValueError("its weights cannot change while it runs on several devices, or offloads them")
        worker = DiffusionGPUWorker(model, self._config, self._memory)
        worker.init_device()
        runner = worker.load_model(lambda: None, copies=True)

        def use() -> None:
            self._worker, self.runner = worker, runner

        return use

    @property
    def is_asleep(self) -> bool:
        """Whether its weights are not where they are computed with."""
        return self._worker.sleep_level > 0

    def sleep(self, level: int) -> None:
        """Gives the memory of the weights back, while no job runs. 1: they move to the host. 2: they are dropped."""
        self.runner.prompt_cache.clear()
        self._worker.sleep(level)

    def wake_up(self) -> bool:
        """Takes the memory again. Returns whether the weights are there; else `load_beside` has to load them."""
        return self._worker.wake_up()

    def close(self) -> None:
        """Ends other processes of the denoiser."""
        self._worker.close()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.runner.running or self._ended)

    @property
    def has_room(self) -> bool:
        """Whether a new job would start at once."""
        return len(self._waiting) + len(self.runner.running) < self._max_running

    @property
    def unbatched(self) -> list[str]:
        """Networks whose calls are not computed together, because the requests would change each other's results."""
        return [*self._worker.unbatched, *self.runner.changed]

    def add(self, job: DiffusionJob) -> None:
        """Starts a job, up to its first module call, or queues it until another one ends."""
        self._waiting.append(job)
        self._start_waiting()

    def abort(self, request_id: str) -> None:
        """Aborts all jobs of a request. Those that had ended before are still returned by `step`."""
        self._waiting = deque(job for job in self._waiting if job.request_id != request_id)
        for running in list(self.runner.running):
            if running.job.request_id == request_id:
                self.runner.abort(running)
        self._start_waiting()

    def step(self) -> tuple[list[JobEnd], int]:
        """Computes one module call of each of the jobs that can be computed together.

        Returns:
            The jobs that ended, and the number of jobs that were computed.
        """
        batch = self._next_batch()
        ends, self._ended = self._ended, []
        if batch:
            self.on_shape((batch[0].waiting_call.layout, len(batch)))
            ends += self._execute(batch)
        self._start_waiting()
        return ends, len(batch)

    def _execute(self, batch: list[RunningJob]) -> list[JobEnd]:
        others_wait = len(batch) < len(self.runner.running)
        started = time.monotonic()
        ends = self._worker.execute(batch)
        if others_wait:  # The device may still compute, and who is next depends on how long it does.
            self._worker.synchronize()
        seconds = time.monotonic() - started
        for running in batch:
            running.add_seconds(seconds)
        return ends

    def _start_waiting(self) -> None:
        while self._waiting and len(self.runner.running) < self._max_running:
            job = self._next_waiting()
            self._waiting.remove(job)
            self._last_started = job.request_id
            end = self.runner.start(job)
            if end is not None:
                self._ended.append(end)

    def _next_waiting(self) -> DiffusionJob:
        """The job to start next, by priority and in order of arrival: of the request with the fewest running jobs, and,
        where these are as many, of another one than the last. So one picture does not wait for all outputs of a request
        before it."""
        num_running = Counter(running.job.request_id for running in self.runner.running)

        def rank(job: DiffusionJob) -> tuple[int, int, bool]:
            return job.priority, num_running[job.request_id], job.request_id == self._last_started

        return min(self._waiting, key=rank)

    @property
    def _max_running(self) -> int:
        return 1 if self.runner.changed else self.max_batch_size

    def _next_batch(self) -> list[RunningJob]:
        """The jobs to compute next: the first one, with all that can join it."""
        running = self.runner.running
        if not running or self.runner.changed:
            return running[:1]
        first, *_ = ordered = self._order(running)
        call, adapter = first.waiting_call, first.job.adapter
        others = [job for job in ordered if job.job.adapter == adapter]
        joinable = find_joinable(call, [job.waiting_call for job in others])
        joined = [job for job, is_joined in zip(others, joinable, strict=True) if is_joined]
        return joined[: self._worker.max_batch_size(call)]

    def _order(self, running: list[RunningJob]) -> list[RunningJob]:
        """The jobs in the order in which they are to be computed.

        Of a priority, a job without a completed step comes first: once it has caught up, all its steps are computed
        together with the others. Then comes the one with the largest slowdown: a second of waiting is as bad for a
        picture of one second as a minute is for a video of one minute. So a short job passes a long one, until that has
        fallen behind as far.
        """
        now = time.monotonic()

        def urgency(job: RunningJob) -> Urgency:
            behind = -job.slowdown(now) if job.has_started else job.num_calls
            return Urgency(job.job.priority, job.has_started, behind)

        return sorted(running, key=urgency)
