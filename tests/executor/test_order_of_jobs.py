# SPDX-License-Identifier: Apache-2.0
"""The order in which an executor computes its jobs, without a pipeline: a clock that only module calls advance."""

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.batched_call import ModuleCall, SharedTensors
from vllm_omni.diffusion.job import DiffusionJob, JobEnd, RunningJob
from vllm_omni.executor import diffusers_executor
from vllm_omni.executor.diffusers_executor import DiffusersPipelineExecutor

PICTURE = {"num_steps": 4, "seconds": 1}
VIDEO = {"num_steps": 20, "seconds": 10}


def denoise(rows: torch.Tensor) -> torch.Tensor:
    return rows


class Pipeline:
    """In place of the runner and of the worker: each job has a call for each step, of so many seconds.

    Attributes:
        order: The request ids of each module call.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.running: list[RunningJob] = []
        self.changed: list[str] = []
        self.order: list[list[str]] = []

    def monotonic(self) -> float:
        return self.now

    def start(self, job: DiffusionJob) -> None:
        rows = torch.zeros(1, job.arguments["seconds"])  # Calls that take equally long can be joined.
        call: Any = SimpleNamespace(close=lambda: None)
        waiting = ModuleCall.describe(denoise, (rows,), {}, SharedTensors())
        self.running.append(RunningJob(job, call, waiting))

    def execute(self, batch: Sequence[RunningJob]) -> list[JobEnd]:
        self.order.append([running.job.request_id for running in batch])
        self.now += batch[0].job.arguments["seconds"]
        ends = []
        for running in batch:
            self.running.remove(running)
            running.num_calls += 1
            running.num_completed, running.num_steps = running.num_calls, running.job.arguments["num_steps"]
            running.has_started = True
            if running.num_completed == running.num_steps:
                ends.append(JobEnd(running.job))
            else:
                self.running.append(running)
        return ends

    def synchronize(self) -> None:
        pass

    def max_batch_size(self, call: ModuleCall) -> int:
        return sys.maxsize


class Load:
    """Jobs that arrive at given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_batch_size: int = 4) -> None:
        self.pipeline: Any = Pipeline()
        self.executor = DiffusersPipelineExecutor("", DiTConfig(max_batch_size=max_batch_size))
        self.executor.runner = self.executor._worker = self.pipeline
        self.ended: dict[str, float] = {}
        self._arrivals: list[tuple[float, DiffusionJob]] = []
        monkeypatch.setattr(diffusers_executor, "time", self.pipeline)

    def add(self, when: float, name: str, arguments: dict[str, int], count: int = 1, priority: int = 0) -> None:
        self._arrivals += [(when, make_job(name, index, arguments, when, priority)) for index in range(count)]

    def run(self) -> dict[str, float]:
        """When each request had its last output."""
        self._arrivals.sort(key=lambda arrival: arrival[0])
        while self._arrivals or self.executor.has_work:
            if not self.executor.has_work:
                self.pipeline.now = max(self.pipeline.now, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self.pipeline.now:
                self.executor.add(self._arrivals.pop(0)[1])
            ends, _ = self.executor.step()
            self.ended |= {end.job.request_id: self.pipeline.now for end in ends}
        return self.ended


def make_job(name: str, index: int, arguments: dict[str, int], when: float, priority: int = 0) -> DiffusionJob:
    return DiffusionJob(
        request_id=name,
        index=index,
        pipeline_class=object,
        arguments=arguments,
        seed=0,
        arrival=when,
        priority=priority,
    )


@pytest.mark.parametrize("when", [51.0, 58.0])
def test_a_picture_passes_a_video_between_two_of_its_steps(monkeypatch: pytest.MonkeyPatch, when: float):
    load = Load(monkeypatch)
    load.add(0, "video", VIDEO)
    load.add(when, "picture", PICTURE)
    ended = load.run()
    assert ended == {"picture": 64.0, "video": 204.0}, "the step that is computed is not interrupted, no other comes"


def test_a_video_goes_on_while_pictures_come_for_ever(monkeypatch: pytest.MonkeyPatch):
    """Without them it takes 200 s. They leave it a fifth of the time."""
    load = Load(monkeypatch)
    load.add(0, "video", VIDEO)
    arrivals = {f"picture {number}": 5.0 * number + 1 for number in range(300)}
    for name, when in arrivals.items():
        load.add(when, name, PICTURE)
    ended = load.run()
    slowdown = ended["video"] / 200
    assert 1 < slowdown < 5
    worst = max(ended[name] - when for name, when in arrivals.items() if when < ended["video"])
    assert worst <= 4 * slowdown + 2 * 10, "no more than the video itself, but for the steps that it computes"


def test_pictures_that_can_be_joined_are_computed_together(monkeypatch: pytest.MonkeyPatch):
    load = Load(monkeypatch)
    load.add(0, "video", VIDEO)
    for number in range(3):
        load.add(11 + number, f"{number}", PICTURE)
    load.run()
    assert [names for names in load.pipeline.order if "video" not in names] == [["0", "1", "2"]] * 4


@pytest.mark.parametrize("max_batch_size", [1, 2])
def test_one_picture_does_not_wait_for_all_of_a_request_before_it(monkeypatch: pytest.MonkeyPatch, max_batch_size: int):
    load = Load(monkeypatch, max_batch_size)
    load.add(0, "many", PICTURE, count=8)
    load.add(1, "single", PICTURE)
    load.add(1, "another", PICTURE)
    ended = load.run()
    assert ended["single"] == 8.0, "when the first of them has ended"
    assert ended["another"] < ended["many"]


def test_requests_with_several_outputs_take_turns(monkeypatch: pytest.MonkeyPatch):
    load = Load(monkeypatch, max_batch_size=1)
    load.add(0, "a", PICTURE, count=2)
    load.add(0, "b", PICTURE, count=2)
    load.run()
    assert [names[0] for names in load.pipeline.order[::4]] == ["a", "b", "a", "b"]


def test_priority_comes_first(monkeypatch: pytest.MonkeyPatch):
    load = Load(monkeypatch, max_batch_size=2)
    load.add(0, "video", VIDEO, priority=-1)
    load.add(1, "picture", PICTURE)
    load.add(2, "another", PICTURE)
    load.add(3, "urgent", PICTURE, priority=-2)
    assert load.run() == {"video": 200.0, "urgent": 204.0, "picture": 204.0, "another": 208.0}


def test_the_time_of_encoders_is_not_that_of_a_step():
    running = RunningJob(make_job("video", 0, VIDEO, when=0.0), call=SimpleNamespace())  # type: ignore[arg-type]
    running.add_seconds(100.0)
    running.num_completed, running.num_steps = 1, 10
    running.add_seconds(1.0)
    assert running.slowdown(101.0) == 1.0
    assert running.slowdown(211.0) == 2.0, "110 s of its own, and as many of waiting"
    running.num_completed = 2
    running.add_seconds(3.0)
    assert running.slowdown(104.0) == 1.0
    assert running.slowdown(104.0 + 120.0) == 2.0, "100 s, and ten steps of 2 s"
