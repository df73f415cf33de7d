# SPDX-License-Identifier: Apache-2.0
"""A part of `streaming.py`: processes of stages that are killed while eight clients listen.

The clients of `shapes` send eight texts to be spoken, at once, and again when all have been answered. In each round one
process of one stage is killed, in turn, after a random number of events; the next round begins when all are ready. All
streams are compared with the same eight without a kill. Once with one process for each stage, and once with two.

Gap: silence in the middle of the speech, for a client that plays from its first segment on. Lead: how much later it
would have to begin, to hear no gap.
"""

import os
import random
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from report import Report, percentile, progress, underrun

from vllm_omni import ARSegmentEvent, ErrorEvent, OmniLLM
from vllm_omni.model_packages import find_models

MODEL, SAMPLE_RATE = "shapes", 24_000
CLIENTS = 8
REPLICAS = (1, 2)
ATOL = 1e-6
"""A stream alone and in a batch differ by 4e-7."""
RESTART = {"window_s": 1.0}
"""Every death is the first: it is followed by the shortest back-off."""


@dataclass
class Stream:
    """What one client has received.

    Attributes:
        pieces: When each segment of speech arrived, and its samples, float32 `[samples]`.
    """

    text: str = ""
    pieces: list[tuple[float, torch.Tensor]] = field(default_factory=list)
    is_broken: bool = False

    @property
    def sound(self) -> torch.Tensor:
        return torch.cat([samples for _, samples in self.pieces])

    @property
    def segments(self) -> list[tuple[float, float]]:
        return [(when, len(samples) / SAMPLE_RATE) for when, samples in self.pieces]

    def difference(self, expected: "Stream") -> float:
        """The largest one between two samples; infinite if text or length differ."""
        if self.text != expected.text or self.sound.shape != expected.sound.shape:
            return float("inf")
        return float((self.sound - expected.sound).abs().max())


@dataclass
class Rounds:
    """All rounds of one pipeline."""

    streams: list[Stream] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)

    def add(self, streams: Sequence[Stream], expected: Sequence[Stream]) -> None:
        self.streams += streams
        pairs = zip(streams, expected, strict=True)
        self.differences += [stream.difference(other) for stream, other in pairs if not stream.is_broken]

    def row(self) -> dict[str, Any]:
        whole = [stream.segments for stream in self.streams if not stream.is_broken]
        gaps = [longest_gap(segments) for segments in whole]
        return {
            "streams": len(self.streams),
            "broken": len(self.streams) - len(whole),
            "differ": sum(difference > ATOL for difference in self.differences),
            "bit by bit": sum(difference == 0 for difference in self.differences),
            "largest difference": max(self.differences),
            "with a gap": sum(gap > 0 for gap in gaps),
            "gap p95 s": percentile(gaps, 95),
            "longest gap s": max(gaps),
            "lead s": max(map(underrun, whole)),
        }


def longest_gap(segments: Sequence[tuple[float, float]]) -> float:
    """The seconds of the longest silence for a client that plays from the first segment on. Arguments as `underrun`."""
    longest, played_until = 0.0, segments[0][0]
    for when, seconds in segments:
        longest = max(longest, when - played_until)
        played_until = max(played_until, when) + seconds
    return longest


class Killer:
    """Kills the processes of a pipeline's stages, in turn."""

    def __init__(self, llm: OmniLLM) -> None:
        self._llm = llm
        self.count = 0

    def kill(self) -> None:
        stages = self._llm._pipeline.orchestrator._supervisor.stages
        process = stages[self.count % len(stages)].process
        assert process is not None, "all stages are ready"
        os.kill(process.pid, signal.SIGKILL)
        self.count += 1

    def wait_until_ready(self) -> None:
        """Until the stages that were killed have started again."""
        while sum(stage.num_restarts for stage in self._llm.health()) < self.count or any(
            stage.state != "ready" for stage in self._llm.health()
        ):
            time.sleep(0.02)


def listen(llm: OmniLLM, conversations: list[Any], killer: Killer | None = None, num_events: int = 0) -> list[Stream]:
    """The stream of each conversation. After so many segments a stage is killed."""
    streams = [Stream() for _ in conversations]
    count = 0
    for event in llm.chat(conversations, stream=True):
        stream = streams[event.prompt_index]
        if isinstance(event, ErrorEvent):
            stream.is_broken = True
        elif isinstance(event, ARSegmentEvent):
            if killer is not None and count == num_events:
                killer.kill()
            count += 1
            stream.text += event.text
            if "audio" in event.multimodal_output:
                stream.pieces.append((time.monotonic(), event.multimodal_output["audio"]))
    return streams


def open_pipeline(folder: Path, replicas: int) -> OmniLLM:
    config = yaml.safe_load((find_models().checkpoints[MODEL] / "stage_config.yaml").read_text())
    config["runtime"]["restart"] = RESTART
    for stage in config["stage_args"]:
        stage["runtime"]["replicas"] = replicas
    path = folder / f"{replicas}.yaml"
    path.write_text(yaml.safe_dump(config))
    return OmniLLM(MODEL, str(path))


def measure(args: Namespace) -> Report:
    from coloured_shapes.language import describe, random_scene  # The other parts need no package of examples.

    num_kills = args.kills or (6 if args.quick else 100)
    dice = random.Random(0)
    texts = [f"Say: {describe(random_scene(dice))}" for _ in range(CLIENTS)]
    conversations: list[Any] = [[{"role": "user", "content": text}] for text in texts]
    report = Report("deaths", {"model": MODEL, "clients": CLIENTS})
    for replicas in REPLICAS:
        with tempfile.TemporaryDirectory() as folder, open_pipeline(Path(folder), replicas) as llm:
            killer, disturbed, undisturbed = Killer(llm), Rounds(), Rounds()
            expected = listen(llm, conversations)
            num_segments = sum(1 for event in llm.chat(conversations, stream=True) if isinstance(event, ARSegmentEvent))
            for number in range(num_kills):
                if number % 10 == 0:
                    progress(f"{replicas} of each stage: kill {number} of {num_kills}")
                    undisturbed.add(listen(llm, conversations), expected)
                disturbed.add(listen(llm, conversations, killer, dice.randrange(num_segments * 3 // 4)), expected)
                killer.wait_until_ready()
        for kills, rounds in ((0, undisturbed), (killer.count, disturbed)):
            report.rows.append({"processes of a stage": replicas, "kills": kills, **rounds.row()})
        report.ratios[f"unbroken_{replicas}"] = 1 - disturbed.row()["broken"] / len(disturbed.streams)
    report.notes += [
        f"differ: in text, in length, or by more than {ATOL:g} in a sample, which is what batches of other sizes do",
        "unbroken: streams that came to their end, to all; 1 is asked",
    ]
    return report
