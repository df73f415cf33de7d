# SPDX-License-Identifier: Apache-2.0
"""`trace_file=`: a timeline that opens in Perfetto (https://ui.perfetto.dev), in Chrome's trace event format.

There is a group of tracks for the requests and one for each replica of a stage. An admitted request takes the lowest
free slot and keeps that track in all groups until it ends: requests that overlap never share a track, and the slices of
a track nest.

Events are written when a request ends; only running requests are kept in memory. Each write contains whole events, so
that a file whose process was killed lacks only its closing bracket, which Perfetto does not need.

Format: "Trace Event Format", Google; the JSON array form.
"""

import heapq
import io
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.metrics.logs import get_logger
from vllm_omni.metrics.observer import PipelineObserver, RequestSummary
from vllm_omni.metrics.stats import StageMetrics

logger = get_logger(__name__)

Event = dict[str, Any]

# Perfetto shows `NAME NUMBER` of a group and of a track. It treats process 0 as the idle process, and shows the track
# with its group's number first, as that of a main thread.
_REQUESTS_PID = 1
_FIRST_STAGE_PID = 2
_FIRST_SLOT = 1000


@dataclass(frozen=True, slots=True)
class _Running:
    slot: int
    admitted: float
    modalities: list[str]


class Timeline(PipelineObserver):
    """Writes the timeline of one pipeline."""

    def __init__(self, path: str | Path, config: PipelineConfig) -> None:
        """
        Raises:
            OSError: The file cannot be written.
        """
        self._path = Path(path)
        self._pids = {replica.name: _FIRST_STAGE_PID + i for i, replica in enumerate(config.instances.values())}
        self._origin = time.monotonic()
        self._running: dict[str, _Running] = {}
        self._free_slots: list[int] = []
        # Unbuffered: the file holds whole events even if the process is killed.
        self._file = self._path.open("wb", buffering=0)
        self._separator = b"[\n"
        names = {_REQUESTS_PID: "requests"}
        names |= {self._pids[i.name]: f"stage {i.stage.stage_id}: {i.name}" for i in config.instances.values()}
        self._write(event for pid, name in names.items() for event in _group(pid, name))

    def request_started(
        self, request_id: str, modalities: list[str], trace_headers: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        self._running[request_id] = _Running(self._take_slot(), time.monotonic(), modalities)
        return {}

    def request_ended(self, summary: RequestSummary) -> None:
        running = self._running.pop(summary.request_id)
        heapq.heappush(self._free_slots, running.slot)
        self._write(self._request_events(summary, running))

    def close(self) -> None:
        self._write([], end=b"\n]\n")
        self._file.close()

    def _take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        slot = _FIRST_SLOT + len(self._running)
        self._write(_thread_name(pid, slot) for pid in (_REQUESTS_PID, *self._pids.values()))
        return slot

    def _write(self, events: Iterable[Event], end: bytes = b"") -> None:
        if self._file.closed:
            return
        lines = []
        for event in events:
            lines += [self._separator, msgspec.json.encode(event)]
            self._separator = b",\n"
        try:
            _write_all(self._file, b"".join([*lines, end]))
        except OSError as error:
            logger.error("%s is not written any further, the pipeline continues: %s", self._path, error)
            self._file.close()

    def _request_events(self, summary: RequestSummary, running: _Running) -> Iterator[Event]:
        on_track = {"pid": _REQUESTS_PID, "tid": running.slot}
        args = {
            "request_id": summary.request_id,
            "modalities": running.modalities,
            "outcome": summary.outcome,
            "failed_stage": summary.failed_stage,
            "num_text_tokens": summary.num_text_tokens,
            "audio_seconds": summary.audio_seconds,
            "num_images": summary.num_images,
            "seconds_until_admitted": running.admitted - summary.arrival,
        }
        name = f"request {summary.request_id}"
        yield self._slice(name, "request", running.admitted, summary.ended) | on_track | {"args": args}
        firsts = {
            "first text": summary.first_text,
            "first audio": summary.first_audio,
            "first image": summary.first_image,
        }
        for text, at in firsts.items():
            if at is not None:
                yield {"name": text, "cat": "first", "ph": "i", "s": "t", "ts": self._timestamp(at)} | on_track
        for stage in summary.stages:
            for event in self._stage_events(name, stage):
                yield event | {"pid": self._pids[stage.name], "tid": running.slot}

    def _stage_events(self, name: str, stage: StageMetrics) -> Iterator[Event]:
        args = {
            "num_input_tokens": stage.num_input_tokens,
            "num_cached_tokens": stage.num_cached_tokens,
            "num_output_tokens": stage.num_output_tokens,
            "num_chunks": stage.num_chunks,
        }
        yield self._slice(name, "stage", stage.arrival, stage.finished) | {"args": args}
        if stage.started:  # Not set where the stage had nothing to do for the request.
            yield self._slice("queue", "queue", stage.arrival, stage.started)
            yield self._slice("work", "work", stage.started, stage.finished)

    def _slice(self, name: str, category: str, begin: float, end: float) -> Event:
        start = self._timestamp(begin)
        return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": self._timestamp(end) - start}

    def _timestamp(self, seconds: float) -> int:
        """Whole microseconds, so that a slice that ends where another begins also does so in the file."""
        return round((seconds - self._origin) * 1e6)


def _group(pid: int, name: str) -> Iterator[Event]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}


def _thread_name(pid: int, slot: int) -> Event:
    return {"name": "thread_name", "ph": "M", "pid": pid, "tid": slot, "args": {"name": "slot"}}


def _write_all(file: io.FileIO, data: bytes) -> None:
    """Writes all of the data or, with an error, nothing of it."""
    size = file.tell()
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(size)
        raise
