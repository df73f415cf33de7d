# SPDX-License-Identifier: Apache-2.0
"""How many replicas of which stage a number of listeners needs: a simulation, with the times of your own stages.

A part of `scale_out.py`: `--simulate --listeners 100 --stages '[{"name": "thinker", ...}, ...]'`.

A listener asks, hears the answer to its end, pauses, and asks again. The stages of an answer work at the same time,
each on what the one before has made. A step of a replica makes one unit (a token, a frame, a window) for each request
that can go on, and takes `step_ms + per_request_ms * requests`; `prefill_ms` is added to the step in which a request
begins. These times are in `stats_table()` and in the tables of `vllm bench serve --omni`; those below are an example,
no measurement.
"""

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from report import Report, mean, percentile

EXAMPLE = [
    {"name": "thinker", "step_ms": 12, "per_request_ms": 0.15, "prefill_ms": 30, "units_per_s": 4, "max_num_seqs": 64},
    {"name": "talker", "step_ms": 9, "per_request_ms": 0.25, "prefill_ms": 5, "units_per_s": 12.5, "max_num_seqs": 64},
    {"name": "code2wav", "step_ms": 6, "per_request_ms": 2, "units_per_s": 0.5, "max_num_seqs": 64},
]
ANSWER_S = 8.0
PAUSE_S = 6.0
MOST_INTERRUPTED = 0.01


@dataclass(frozen=True, kw_only=True)
class Stage:
    """
    Attributes:
        units_per_s: That a second of speech needs.
        first_units: Of the stage before, that the first unit needs; a later one needs its share of them.
    """

    name: str
    step_ms: float
    per_request_ms: float
    units_per_s: float
    max_num_seqs: int
    prefill_ms: float = 0.0
    first_units: int = 2
    replicas: int = 1


@dataclass(eq=False)
class Answer:
    """Seconds of speech, when it was asked for, and the units that each stage has made."""

    seconds: float
    asked: float
    made: list[int]
    needed: list[int]
    replicas: "list[Replica]"
    heard: list[float] = field(default_factory=list)


class Replica:
    """Runs steps as long as it has requests that can go on."""

    def __init__(self, stage: Stage, index: int, simulation: "Simulation") -> None:
        self._stage, self._index, self._simulation = stage, index, simulation
        self._waiting: deque[Answer] = deque()
        self.running: list[Answer] = []
        self._is_busy = False
        self._prefill_ms = 0.0  # of requests that begin with the next step
        self.busy_s = 0.0

    @property
    def load(self) -> int:
        return len(self._waiting) + len(self.running)

    def submit(self, answer: Answer) -> None:
        self._waiting.append(answer)
        self.wake()

    def wake(self) -> None:
        """Starts a step, if none runs and there is something to do."""
        if self._is_busy:
            return
        while self._waiting and len(self.running) < self._stage.max_num_seqs:
            self.running.append(self._waiting.popleft())
            self._prefill_ms += self._stage.prefill_ms
        batch = [answer for answer in self.running if self._can_go_on(answer)]
        if not batch:
            return
        self._is_busy = True
        seconds = (self._prefill_ms + self._stage.step_ms + self._stage.per_request_ms * len(batch)) / 1000
        self._prefill_ms = 0.0
        self.busy_s += seconds
        self._simulation.after(seconds, lambda: self._end_step(batch))

    def _can_go_on(self, answer: Answer) -> bool:
        index, made = self._index, answer.made[self._index]
        if index == 0:
            return True
        total, needed = answer.needed[index - 1], answer.needed[index]
        is_first = made == 0 and needed > 1
        return answer.made[index - 1] >= min(
            total, self._stage.first_units if is_first else (made + 1) * total / needed
        )

    def _end_step(self, batch: list[Answer]) -> None:
        self._is_busy = False
        for answer in batch:
            answer.made[self._index] += 1
            if answer.made[self._index] == answer.needed[self._index]:
                self.running.remove(answer)
            self._simulation.on_unit(answer, self._index)
        self.wake()


class Simulation:
    """Listeners and stages; `now` in seconds."""

    def __init__(self, stages: list[Stage], listeners: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._stages = stages
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.replicas = [
            [Replica(stage, index, self) for _ in range(stage.replicas)] for index, stage in enumerate(stages)
        ]
        self.answers: list[Answer] = []
        for _ in range(listeners):
            self.after(self._rng.uniform(0, ANSWER_S + PAUSE_S), self._ask)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, seconds: float) -> None:
        while self._events and self._events[0][0] < seconds:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _ask(self) -> None:
        seconds = self._rng.uniform(0.5, 1.5) * ANSWER_S
        needed = [max(1, round(seconds * stage.units_per_s)) for stage in self._stages]
        replicas = [min(replicas, key=lambda replica: replica.load) for replicas in self.replicas]
        answer = Answer(seconds, self.now, [0] * len(needed), needed, replicas)
        self.answers.append(answer)
        for replica in replicas:
            replica.submit(answer)

    def on_unit(self, answer: Answer, index: int) -> None:
        """A stage has made a unit of an answer."""
        if index + 1 < len(self._stages):
            answer.replicas[index + 1].wake()
            return
        answer.heard.append(self.now)
        if answer.made[index] == answer.needed[index]:
            end = max(self.now, answer.heard[0] + answer.seconds)
            self.after(end - self.now + self._rng.expovariate(1 / PAUSE_S), self._ask)


def interrupted(answer: Answer) -> bool:
    """Whether a part of the speech came later than it had to be heard."""
    part = answer.seconds / len(answer.heard)
    return any(when > answer.heard[0] + index * part + 0.1 for index, when in enumerate(answer.heard))


def simulate(stages: list[Stage], listeners: int, seconds: float) -> dict[str, float]:
    """Of the answers of the second half."""
    simulation = Simulation(stages, listeners)
    simulation.run(seconds)
    answers = [answer for answer in simulation.answers if seconds / 2 < answer.asked < seconds - 2 * ANSWER_S]
    done = [answer for answer in answers if len(answer.heard) == answer.needed[-1]]
    first = [answer.heard[0] - answer.asked if answer.heard else seconds for answer in answers]
    figures = {
        "first_audio_p95_s": percentile(first, 95),
        "interrupted": 1 - mean(not interrupted(a) for a in done) * len(done) / len(answers),
        "requests_per_s": len(answers) / (seconds / 2 - 2 * ANSWER_S),
    }
    for stage, replicas in zip(stages, simulation.replicas, strict=True):
        figures[f"{stage.name}_busy"] = mean(replica.busy_s / seconds for replica in replicas)
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation")
    group.add_argument("--simulate", action="store_true", help="instead: the replicas that listeners need")
    group.add_argument("--listeners", type=int, nargs="+", default=[50, 100, 200, 400, 800], metavar="N")
    group.add_argument("--stages", type=json.loads, default=EXAMPLE, help="JSON; default: an example")
    group.add_argument("--first-audio", type=float, default=1.0, metavar="S", help="limit of its 95th percentile")


def simulate_all(args: argparse.Namespace) -> Report:
    report = Report("simulation", {"answers_s": ANSWER_S, "pauses_s": PAUSE_S, "first_audio_s": args.first_audio})
    for listeners in args.listeners:
        stages = [Stage(**stage) for stage in args.stages]
        report.rows.append(scale(stages, listeners, 120 if args.quick else 400, args.first_audio))
    report.notes = [
        f"replicas with which the first sound comes in time, and at most {MOST_INTERRUPTED:.0%} of the answers are "
        "interrupted: the one that helps most is added until that is so; busy: the share of time in steps"
    ]
    return report


def scale(stages: list[Stage], listeners: int, seconds: float, first_audio_s: float) -> dict[str, float | str]:
    """Adds the replica that helps most, until all is in time."""
    figures = simulate(stages, listeners, seconds)
    while figures["first_audio_p95_s"] > first_audio_s or figures["interrupted"] > MOST_INTERRUPTED:
        if sum(stage.replicas for stage in stages) > listeners:
            raise SystemExit(f"{listeners} listeners: no number of replicas is enough; is a single answer in time?")
        larger = [_with_one_more(stages, index) for index in range(len(stages))]
        measured = [simulate(one, listeners, seconds) for one in larger]
        best = min(range(len(stages)), key=lambda i: (measured[i]["first_audio_p95_s"], measured[i]["interrupted"]))
        stages, figures = larger[best], measured[best]
    replicas = ", ".join(f"{stage.replicas} {stage.name}" for stage in stages)
    return {"listeners": listeners, "replicas": replicas, **figures}


def _with_one_more(stages: list[Stage], index: int) -> list[Stage]:
    more = replace(stages[index], replicas=stages[index].replicas + 1)
    return [*stages[:index], more, *stages[index + 1 :]]
