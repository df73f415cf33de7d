# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from tests.clock import Clock
from vllm_omni.metrics import recorder as recorder_module
from vllm_omni.metrics.recorder import INTERVAL_S, StageRecorder
from vllm_omni.metrics.stats import CacheCounts, EdgeStats, StageStats


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recorder_module, "time", clock)
    return clock


def work(recorder: StageRecorder) -> None:
    """Two requests of which one fails, two payloads on one edge, a step of two requests and one of one."""
    for _ in range(2):
        recorder.received(4, 100, 0.25)
        recorder.enqueued()
        recorder.dequeued()
    recorder.window(4)
    recorder.window(6)
    recorder.step(0.5, 2)
    recorder.step(0.25, 1)
    for outcome in ("StageExecutionError", "completed", "aborted"):
        recorder.ended(outcome)


def test_a_snapshot_has_all_counts():
    recorder = StageRecorder(5, "talker")
    work(recorder)
    caches = {"encoder": CacheCounts(queries=3, hits=1)}
    assert recorder.snapshot(3, 2, (10, 64), caches, ["unet"], (700, 90)) == StageStats(
        stage_id=5,
        name="talker",
        queue_depth=3,
        num_running=2,
        num_enqueued=2,
        num_dequeued=2,
        num_completed=1,
        num_aborted=1,
        failures={"StageExecutionError": 1},
        num_steps=2,
        step_seconds=0.75,
        num_scheduled=3,
        kv_blocks_used=10,
        kv_blocks_total=64,
        resident_bytes=700,
        device_bytes=90,
        caches=caches,
        unbatched=["unet"],
        edges={
            4: EdgeStats(num_payloads=2, num_bytes=200, seconds=0.5, num_windows=1),
            6: EdgeStats(num_windows=1),
        },
    )


def test_a_snapshot_does_not_change():
    recorder = StageRecorder(5, "talker")
    work(recorder)
    before = recorder.snapshot(0, 0)
    work(recorder)
    after = recorder.snapshot(0, 0)
    assert (before.failures, before.edges[4].num_bytes, before.num_steps) == ({"StageExecutionError": 1}, 200, 2)
    assert (after.failures, after.edges[4].num_bytes, after.num_steps) == ({"StageExecutionError": 2}, 400, 4)


def test_recorders_share_no_counts():
    first, second = StageRecorder(0, "first"), StageRecorder(1, "second")
    work(first)
    assert second.snapshot(0, 0) == StageStats(stage_id=1, name="second")


def test_a_change_makes_a_snapshot_due_after_the_interval(clock):
    recorder = StageRecorder(5, "talker")
    assert recorder.due is None
    recorder.changed()
    assert recorder.due == 1000.0
    recorder.snapshot(0, 0)
    assert recorder.due is None
    for clock.now in (1000.01, 1000.02):
        recorder.changed()
        assert recorder.due == 1000.0 + INTERVAL_S


def test_blocked_time_is_counted_once_per_interval(clock):
    recorder = StageRecorder(5, "talker")
    for is_blocked, seconds in ((False, 1.0), (True, 2.0), (True, 3.0), (False, 4.0), (False, 5.0)):
        recorder.set_blocked(is_blocked)
        clock.now += seconds
    assert recorder.snapshot(0, 0).blocked_seconds == 5.0


def test_a_snapshot_crosses_processes():
    recorder = StageRecorder(5, "talker")
    work(recorder)
    stats = recorder.snapshot(3, 2, (10, 64))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=StageStats) == stats
