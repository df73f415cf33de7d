# SPDX-License-Identifier: Apache-2.0
"""Two hundred requests of all kinds, with aborts, deadlines, failures and a killed stage among them.

Each must end once, in a way that something which happened to it explains; whatever completes must be what the request
gives when it runs alone; and nothing of them may be left anywhere.
"""

import random
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from tests.orchestrator.pipelines import Caller, error_of, fake_stage, fresh_stats, make_config, opened
from tests.orchestrator.test_failure import QUICKLY, is_ready, kill, payload_files, processes, wait_until
from vllm_omni.errors import RequestAbortedError, RequestTimeoutError, StageDeadError, StageExecutionError
from vllm_omni.events import ARSegmentEvent, CompletedEvent, ErrorEvent, OmniEvent

pytestmark = pytest.mark.slow

NUM_REQUESTS = 200
NUM_OPEN = 60
LIMITS = {
    "max_inflight": 20,
    "defaults": {"max_queued": 4, "high_watermark_bytes": 2_000_000},
    "restart": QUICKLY,
}


def diamond(replicas: int) -> tuple[dict, ...]:
    """a writes text; b reads a's whole output and c its rows, two at a time; d reads both and makes "audio"."""
    return (
        fake_stage(0, "a", (), "text", replicas=replicas),
        fake_stage(1, "b", (0,), replicas=replicas),
        fake_stage(2, "c", (0,), max_inflight=3, replicas=replicas),
        fake_stage(3, "d", (1, 2), "audio", replicas=replicas),
    )


WINDOW = {"from": 0, "to": 2, "window_size": 2, "left_context": 1, "unit": "rows"}


def running(replicas: int) -> AbstractContextManager[Caller]:
    return opened(make_config(*diamond(replicas), edges=[WINDOW], **LIMITS))


class Kind:
    """One of the requests: its options, and how it is disturbed."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self.prompt = f"p{number}"
        self.modalities = rng.choice([("text",), ("audio",), ("text", "audio"), ("text", "audio")])
        self.streams = rng.random() < 0.5
        self.seconds = rng.choice([0.0, 0.0, 0.001, 0.003])
        self.timeout_s = rng.choice([0.05, 0.2, 0.5]) if rng.random() < 0.15 else None
        self.is_aborted = rng.random() < 0.2
        self.options: dict[str, Any] = {}
        if rng.random() < 0.6:
            self.options["fake_tokens"] = rng.randint(1, 9)
        if rng.random() < 0.5:
            self.options["fake_bytes"] = rng.choice([10, 65_000, 300_000])
        if rng.random() < 0.1:
            self.options["fake_steps"] = 3
        if rng.random() < 0.5:
            self.options["fake_only"] = rng.choice("abcd")
        if rng.random() < 0.1:
            self.options["fake_fail"] = rng.choice("abcd")

    @property
    def failing_stage(self) -> int | None:
        """The stage that this request makes fail, if it comes there."""
        stage = "abcd".find(self.options.get("fake_fail", "?"))
        return None if stage < 0 or (stage > 0 and self.modalities == ("text",)) else stage

    def submit(self, caller: Caller, seconds: float | None = None, timeout_s: float | None = None) -> str:
        return caller.submit(
            self.prompt,
            self.modalities,
            streams=self.streams,
            timeout_s=timeout_s,
            fake_seconds=self.seconds if seconds is None else seconds,
            **self.options,
        )


def outputs_of(event: CompletedEvent) -> list[tuple]:
    """The final outputs, apart from times and names."""
    return [
        (
            output.stage_id,
            output.final_output_type,
            [(c.text, list(c.token_ids), c.finish_reason) for c in output.outputs],
            {name: tensor.tolist() for name, tensor in output.multimodal_output.items()},
        )
        for output in event.outputs
    ]


def check_events(events: list[OmniEvent]) -> None:
    """One terminal event, the last; none is missing; and the segments of a completed request add up to its output."""
    assert [event.sequence for event in events] == list(range(len(events)))
    assert [event.is_terminal for event in events] == [False] * (len(events) - 1) + [True]
    end = events[-1]
    segments = [event for event in events if isinstance(event, ARSegmentEvent)]
    if not segments or not isinstance(end, CompletedEvent):
        return
    for output in end.outputs:
        pieces = [event for event in segments if event.stage_id == output.stage_id]
        assert "".join(piece.text for piece in pieces) == output.outputs[0].text
        assert [token for piece in pieces for token in piece.tokens] == list(output.outputs[0].token_ids)
        for name, tensor in output.multimodal_output.items():
            assert torch.equal(
                torch.cat([p.multimodal_output[name] for p in pieces if name in p.multimodal_output]), tensor
            )


class AbortStorm:
    """Submits requests and disturbs them, in an order that depends on the events."""

    def __init__(self, caller: Caller, kinds: list[Kind], rng: random.Random, victim: str) -> None:
        self.caller = caller
        self.rng = rng
        self.victim = victim
        self.waiting = list(kinds)
        self.kinds: dict[str, Kind] = {}
        self.open: list[str] = []
        self.aborted: set[str] = set()
        self.stories: dict[str, list[OmniEvent]] = defaultdict(list)
        self.num_ended = 0
        self.kill_after = rng.randint(NUM_REQUESTS // 4, NUM_REQUESTS // 2)

    def run(self) -> None:
        while self.waiting or self.open:
            while self.waiting and len(self.open) < NUM_OPEN:
                self._submit(self.waiting.pop())
            self._take(self.caller.next())

    def _submit(self, kind: Kind) -> None:
        request_id = kind.submit(self.caller, timeout_s=kind.timeout_s)
        self.kinds[request_id] = kind
        self.open.append(request_id)
        if kind.is_aborted and self.rng.random() < 0.1:
            self._abort(request_id)

    def _take(self, event: OmniEvent) -> None:
        self.stories[event.request_id].append(event)
        to_abort = [r for r in self.open if self.kinds[r].is_aborted]
        if to_abort and self.rng.random() < 0.1:
            self._abort(self.rng.choice(to_abort))
        if event.is_terminal:
            self.open.remove(event.request_id)
            self.num_ended += 1
            if self.num_ended == self.kill_after:
                kill(self.caller, self.victim)

    def _abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.caller.orchestrator.abort([request_id])


def check_end(storm: AbortStorm, request_id: str, alone: dict[str, list[tuple] | None]) -> None:
    kind = storm.kinds[request_id]
    end = storm.stories[request_id][-1]
    if isinstance(end, CompletedEvent):
        assert kind.failing_stage is None
        assert outputs_of(end) == alone[kind.prompt], kind.options
        return
    match error := error_of(end):
        case RequestAbortedError():
            assert request_id in storm.aborted
        case RequestTimeoutError():
            assert kind.timeout_s is not None
        case StageDeadError():
            assert error.stage_id == "abcd".index(storm.victim[0])
            assert error.stage_id == 0 or "audio" in kind.modalities, "it did not need the stage"
        case StageExecutionError():
            assert error.stage_id == kind.failing_stage and "fails (fake_fail)" in str(error)
        case _:
            raise AssertionError(f"{request_id} ended on {error!r}")


def run_alone(caller: Caller, kinds: list[Kind]) -> dict[str, list[tuple] | None]:
    """The outputs of each request alone, by prompt; None where it fails."""
    ends: dict[str, list[tuple] | None] = {}
    for kind in kinds:
        end = caller.events_of(kind.submit(caller, seconds=0.0))[-1]
        ends[kind.prompt] = outputs_of(end) if isinstance(end, CompletedEvent) else None
        assert isinstance(end, ErrorEvent) == (kind.failing_stage is not None)
    return ends


def check_nothing_is_left(caller: Caller, victim: str) -> None:
    wait_until(lambda: is_ready(caller))
    assert {stage.name: stage.num_restarts for stage in caller.orchestrator.health()} == {
        name: int(name == victim) for name in processes(caller)
    }
    stats = fresh_stats(caller.orchestrator)
    assert {stage.name: (stage.queue_depth, stage.num_running) for stage in stats} == dict.fromkeys(
        processes(caller), (0, 0)
    )
    assert set(caller.orchestrator.activity().values()) == {0}
    wait_until(lambda: payload_files(caller) == [])  # what was on its way to an aborted request is still to be dropped
    assert caller.events.empty()


@pytest.mark.parametrize(
    ("seed", "victim", "replicas"),
    [(1, "a", 1), (2, "b", 1), (3, "c", 1), (4, "d", 1), (5, "a.1", 2), (6, "b.0", 2), (7, "c.1", 2), (8, "d.0", 2)],
)
def test_every_request_ends_once_and_completed_ones_equal_those_alone(seed: int, victim: str, replicas: int) -> None:
    rng = random.Random(seed)
    kinds = [Kind(rng, number) for number in range(NUM_REQUESTS)]
    with running(replicas) as caller:
        alone = run_alone(caller, kinds)
        storm = AbortStorm(caller, kinds, rng, victim)
        storm.run()
        assert len(storm.stories) == NUM_REQUESTS
        for request_id, events in storm.stories.items():
            check_events(events)
            check_end(storm, request_id, alone)
        check_nothing_is_left(caller, victim)
        again = [kind.submit(caller) for kind in kinds[:40] if kind.failing_stage is None]
        assert all(isinstance(end, CompletedEvent) for end in caller.wait(len(again)).values())
        check_nothing_is_left(caller, victim)
