# SPDX-License-Identifier: Apache-2.0
"""Pipelines of fake and function stages, and a caller that records the events of every request."""

import functools
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from tests.forked_programs import QuickForkServer
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.events import CompletedEvent, ErrorEvent, OmniEvent
from vllm_omni.inputs import StageRequest
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.metrics.stats import StageStats
from vllm_omni.orchestrator.orchestrator import Orchestrator
from vllm_omni.orchestrator.request import PipelineRequest

TIMEOUT_S = 240
"""Only reports a failure before pytest's own limit: other work on the machine may take most of it."""
FAR = 1e6
"""Seconds: what is held in a test is so until the test ends it."""


def fake_stage(stage_id: int, name: str, sources: tuple[int, ...] = (), output: str = "", **runtime: Any) -> dict:
    """A fake stage's entry in `stage_args`; `output` is its final output type, if any."""
    stage = {
        "stage_id": stage_id,
        "engine_type": "fake",
        "engine_args": {"model_stage": name},
        "engine_input_source": list(sources),
        "runtime": runtime,
    }
    return stage | ({"final_output": True, "final_output_type": output} if output else {})


def function_stage(stage_id: int, name: str, function: Any, sources: tuple[int, ...] = (), output: str = "") -> dict:
    """A stage that calls a function of a test module."""
    path = f"{function.__module__}.{function.__name__}"
    return fake_stage(stage_id, name, sources, output) | {"engine_type": "function", "function": path}


def make_config(*stages: dict, **runtime: Any) -> PipelineConfig:
    return parse_pipeline_config({"stage_args": list(stages), "runtime": runtime}, "test")


# a makes text; b reads a; c reads a and b and makes "audio".
TRIANGLE = (fake_stage(0, "a", (), "text"), fake_stage(1, "b", (0,)), fake_stage(2, "c", (0, 1), "audio"))


class KeptForkServer(QuickForkServer):
    """Serves one pipeline after another. Ends with the interpreter."""

    def close(self) -> None:
        pass


@functools.cache
def kept_server() -> ForkServer:
    return KeptForkServer()


def open_orchestrator(
    config: PipelineConfig, init_timeout: float = FAR, server: ForkServer | None = None, **options: Any
) -> Orchestrator:
    server = server or kept_server()
    return Orchestrator(config, "", shm_threshold_bytes=65536, init_timeout=init_timeout, server=server, **options)


class Caller:
    """Submits requests and collects their events."""

    def __init__(self, orchestrator: Orchestrator, config: PipelineConfig) -> None:
        self.orchestrator = orchestrator
        self.config = config
        self.events: queue.SimpleQueue[OmniEvent] = queue.SimpleQueue()
        self.count = 0

    def submit(
        self,
        prompt: str,
        modalities: tuple[str, ...] | None = None,
        *,
        streams: bool = False,
        timeout_s: float | None = None,
        wait: bool = True,
        priority: int = 0,
        **options: Any,
    ) -> str:
        self.count += 1
        request_id = f"r{self.count}"
        wanted = list(modalities or self.config.output_types)
        stage_ids = self.config.stages_for(wanted)
        stages = {
            i: StageRequest(request_id=request_id, modalities=wanted, prompt=prompt, options=options, priority=priority)
            for i in stage_ids
        }
        request = PipelineRequest(
            request_id=request_id,
            external_id=request_id,
            stages=stages,
            final_stages=[i for i in stage_ids if self.config.stages[i].final_output_type in wanted],
            on_event=self.events.put,
            streams=streams,
            timeout_s=timeout_s,
            priority=priority,
        )
        self.orchestrator.submit(request, wait=wait)
        return request_id

    def next(self) -> OmniEvent:
        event = self.events.get(timeout=TIMEOUT_S)
        if event.is_terminal:
            self.orchestrator.release(event.request_id)
        return event

    def wait(self, count: int) -> dict[str, CompletedEvent | ErrorEvent]:
        """The terminal events of the next `count` requests to end, by request id."""
        ends: dict[str, CompletedEvent | ErrorEvent] = {}
        while len(ends) < count:
            event = self.next()
            if isinstance(event, CompletedEvent | ErrorEvent):
                assert event.request_id not in ends, "a request ends once"
                ends[event.request_id] = event
        return ends

    def wait_one(self) -> CompletedEvent | ErrorEvent:
        (event,) = self.wait(1).values()
        return event

    def events_of(self, request_id: str) -> list[OmniEvent]:
        """All events up to the end of this request, which must be the only one that runs."""
        events = [self.next()]
        while not events[-1].is_terminal:
            events.append(self.next())
        assert {event.request_id for event in events} == {request_id}
        assert [event.sequence for event in events] == list(range(len(events)))
        return events


def texts(event: OmniEvent) -> list[str]:
    assert isinstance(event, CompletedEvent), event
    return [output.outputs[0].text for output in event.outputs]


def error_of(event: OmniEvent) -> Exception:
    assert isinstance(event, ErrorEvent), event
    return event.error


def state_of(orchestrator: Orchestrator) -> Mapping[str, str]:
    return {stage.name: stage.state for stage in orchestrator.health()}


def fresh_stats(orchestrator: Orchestrator) -> list[StageStats]:
    """Snapshots that the stages made after they had processed all messages that were sent to them before this call.

    Any message to a stage makes a snapshot due. The first new one may be older than the message, the second is not.
    """
    for _ in range(2):
        before = {id(stats): stats for stats in orchestrator.stats()}
        orchestrator._command(lambda: [stage.abort([]) for stage in orchestrator._stages.values()])
        deadline = time.monotonic() + TIMEOUT_S
        while any(id(stats) in before for stats in orchestrator.stats()):
            assert time.monotonic() < deadline, "a stage sends no snapshot"
            time.sleep(0.005)
    return orchestrator.stats()


@contextmanager
def opened(config: PipelineConfig, **options: Any) -> Iterator[Caller]:
    """The caller of a pipeline that has started, and is closed at the end. `options`: see `open_orchestrator`."""
    with closing(open_orchestrator(config, **options)) as orchestrator:
        orchestrator.wait_until_started()
        yield Caller(orchestrator, config)
