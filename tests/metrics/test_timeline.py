# SPDX-License-Identifier: Apache-2.0
"""The timeline as a viewer reads it."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clock import Clock
from tests.metrics.reading import assert_nested, read_events, tracks
from vllm_omni.metrics import timeline as timeline_module
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.metrics.timeline import Timeline


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timeline_module, "time", clock)
    return clock


def test_a_request_has_a_slice_in_each_of_its_stages(config, summarize, tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json", config)
    timeline.request_started("7", ["text", "audio"])
    timeline.request_ended(summarize(first_image=1007.0, num_images=2))
    timeline.close()
    events = read_events(tmp_path / "t.json")
    by_track = tracks(events)
    assert {track: [e["name"] for e in slices] for track, slices in by_track.items()} == {
        ("requests", "slot 1000"): ["request 7"],
        ("stage 0: thinker", "slot 1000"): ["request 7", "queue", "work"],
        ("stage 3: talker", "slot 1000"): ["request 7", "queue", "work"],
    }
    for slices in by_track.values():
        assert_nested(slices)
    (root,) = by_track["requests", "slot 1000"]
    begin = root["ts"]
    assert root["args"]["num_images"] == 2
    assert (root["dur"], root["args"]["outcome"], root["args"]["num_text_tokens"]) == (10_000_000, "completed", 5)
    whole, queue, work = by_track["stage 0: thinker", "slot 1000"]
    assert [(e["ts"] - begin, e["dur"]) for e in (whole, queue, work)] == [
        (0, 6_000_000),
        (0, 1_000_000),
        (1_000_000, 5_000_000),
    ]
    assert whole["args"] == {"num_input_tokens": 12, "num_cached_tokens": 0, "num_output_tokens": 5, "num_chunks": 3}
    instants = {e["name"]: e["ts"] - begin for e in events if e["ph"] == "i"}
    assert instants == {"first text": 2_500_000, "first audio": 4_000_000, "first image": 7_000_000}


def test_requests_that_overlap_do_not_share_a_track(config, summarize, clock, tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json", config)
    for request_id, clock.now in (("a", 1000.0), ("b", 1001.0), ("c", 1002.0)):
        timeline.request_started(request_id, ["text"])
    timeline.request_ended(summarize("b", arrival=1001.0, ended=1010.5))
    clock.now = 1010.5
    timeline.request_started("d", ["text"])
    timeline.request_ended(summarize("a", arrival=1000.0, ended=1012.0))
    timeline.request_ended(summarize("d", arrival=1010.5))
    timeline.request_ended(summarize("c", arrival=1002.0, ended=1030.0))
    timeline.close()
    by_track = tracks(read_events(tmp_path / "t.json"))
    requests = {
        track: [e["name"] for e in slices] for (group, track), slices in by_track.items() if group == "requests"
    }
    assert requests == {"slot 1000": ["request a"], "slot 1001": ["request b", "request d"], "slot 1002": ["request c"]}
    for slices in by_track.values():
        assert_nested(slices)


def test_time_before_admission_is_not_on_the_track(config, summarize, clock, tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json", config)
    timeline.request_started("a", ["text"])
    timeline.request_ended(summarize("a", ended=1010.0))
    clock.now = 1010.0
    timeline.request_started("b", ["text"])
    timeline.request_ended(summarize("b", arrival=1004.0, stages=[], ended=1015.0))
    timeline.close()
    by_track = tracks(read_events(tmp_path / "t.json"))
    first, second = by_track["requests", "slot 1000"]
    assert first["ts"] + first["dur"] == second["ts"]
    assert second["args"]["seconds_until_admitted"] == 6.0


def test_a_failed_request_shows_the_stages_that_finished(config, summarize, tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json", config)
    timeline.request_started("7", ["audio"])
    done = summarize().stages[:1]
    timeline.request_ended(summarize(stages=done, outcome="StageDeadError", failed_stage="talker", first_audio=None))
    timeline.close()
    by_track = tracks(read_events(tmp_path / "t.json"))
    assert {group for group, _ in by_track} == {"requests", "stage 0: thinker"}
    args = by_track["requests", "slot 1000"][0]["args"]
    assert (args["outcome"], args["failed_stage"]) == ("StageDeadError", "talker")


def test_a_stage_without_work_has_no_queue_and_work_slices(config, summarize, tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json", config)
    timeline.request_started("7", ["text"])
    timeline.request_ended(
        summarize(stages=[StageMetrics(stage_id=0, name="thinker", arrival=1001.0, finished=1001.5)])
    )
    timeline.close()
    by_track = tracks(read_events(tmp_path / "t.json"))
    assert [e["name"] for e in by_track["stage 0: thinker", "slot 1000"]] == ["request 7"]


def test_after_a_crash_only_the_closing_bracket_is_missing(config, summarize, tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json", config)
    assert isinstance(json.loads((tmp_path / "t.json").read_text() + "]"), list)
    timeline.request_started("7", ["text"])
    timeline.request_ended(summarize())
    text = (tmp_path / "t.json").read_text()  # what is in the file if the process is killed now
    timeline.close()
    assert json.loads(text + "]") == read_events(tmp_path / "t.json")


FULL_DISK = """
import os, pathlib, pickle, resource, signal, sys
from vllm_omni.metrics.timeline import Timeline

file = pathlib.Path(sys.argv[1])
config, summary = pickle.load(sys.stdin.buffer)
timeline = Timeline(file, config)
sys.stdout.buffer.write(file.read_bytes())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = os.path.getsize(file) + 40
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
timeline.request_started("7", ["text"])
timeline.request_ended(summary)
timeline.close()
"""


def test_a_full_disk_ends_only_the_file(config, summarize, tmp_path: Path):
    """In a process of its own, because the limit is that of a process."""
    before = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path / "t.json"],
        input=pickle.dumps((config, summarize())),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    assert before and (tmp_path / "t.json").read_bytes() == before


def test_tracks_are_reused(config, summarize, clock, tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json", config)
    for i in range(100):
        clock.now = 1000.0 + 20 * i
        timeline.request_started(str(i), ["text"])
        timeline.request_ended(summarize(str(i), arrival=clock.now))
    timeline.close()
    assert {track for _, track in tracks(read_events(tmp_path / "t.json"))} == {"slot 1000"}
