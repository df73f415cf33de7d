# SPDX-License-Identifier: Apache-2.0
import msgspec

from vllm_omni.metrics.recorder import NullRecorder, StageRecorder
from vllm_omni.metrics.stats import EdgeStats, StageStats


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
    recorder.blocked(1.5)
    recorder.failed("StageExecutionError")
    recorder.completed()
    recorder.aborted()


def test_everything_that_happened_is_in_the_snapshot():
    recorder = StageRecorder(5, "talker")
    work(recorder)
    assert recorder.snapshot(3, 2, (10, 64)) == StageStats(
        stage_id=5,
        name="talker",
        queue_depth=3,
        num_running=2,
        num_enqueued=2,
        num_dequeued=2,
        num_completed=1,
        num_aborted=1,
        failures={"StageExecutionError": 1},
        blocked_seconds=1.5,
        num_steps=2,
        step_seconds=0.75,
        num_scheduled=3,
        kv_blocks_used=10,
        kv_blocks_total=64,
        edges={
            4: EdgeStats(num_payloads=2, num_bytes=200, seconds=0.5, num_windows=1),
            6: EdgeStats(num_windows=1),
        },
    )


def test_a_snapshot_stays_what_it_is():
    recorder = StageRecorder(5, "talker")
    work(recorder)
    before = recorder.snapshot(0, 0)
    work(recorder)
    after = recorder.snapshot(0, 0)
    assert (before.failures, before.edges[4].num_bytes, before.num_steps) == ({"StageExecutionError": 1}, 200, 2)
    assert (after.failures, after.edges[4].num_bytes, after.num_steps) == ({"StageExecutionError": 2}, 400, 4)


def test_two_stages_share_no_figures():
    first, second = StageRecorder(0, "first"), StageRecorder(1, "second")
    work(first)
    assert second.snapshot(0, 0) == StageStats(stage_id=1, name="second")


def test_switched_off_it_still_tells_what_is_going_on_now():
    recorder = NullRecorder(5, "talker")
    work(recorder)
    expected = StageStats(stage_id=5, name="talker", queue_depth=3, num_running=2, kv_blocks_used=1, kv_blocks_total=8)
    assert not recorder.enabled
    assert recorder.snapshot(3, 2, (1, 8)) == expected


def test_switched_off_it_overrides_all_that_counts():
    counting = set(vars(StageRecorder)) - {"__init__", "snapshot", "_edge", "__module__", "__doc__"}
    assert {name for name in counting if not name.startswith("__")} <= set(vars(NullRecorder))


def test_a_snapshot_crosses_processes():
    recorder = StageRecorder(5, "talker")
    work(recorder)
    stats = recorder.snapshot(3, 2, (10, 64))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=StageStats) == stats
