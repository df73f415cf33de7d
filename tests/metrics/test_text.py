# SPDX-License-Identifier: Apache-2.0
from vllm_omni.metrics.stats import EdgeStats, StageStats
from vllm_omni.metrics.text import format_stage_table


def test_the_table():
    thinker = StageStats(
        stage_id=0,
        name="thinker",
        queue_depth=12,
        num_running=8,
        num_enqueued=31,
        num_dequeued=19,
        num_completed=9,
        num_aborted=1,
        failures={"StageExecutionError": 1},
        blocked_seconds=1.25,
        num_steps=200,
        step_seconds=3.0,
        num_scheduled=1500,
        kv_blocks_used=40,
        kv_blocks_total=512,
    )
    vocoder = StageStats(
        stage_id=2, name="code2wav", edges={0: EdgeStats(num_payloads=4, num_bytes=2_500_000, seconds=0.01)}
    )
    expected = """\
stage     queued  running  entered  completed  aborted  failed  blocked s  steps  ms/step  batch  KV blocks
thinker       12        8       31          9        1       1       1.25    200    15.00   7.50     40/512
code2wav       0        0        0          0        0       0       0.00      0        -      -          -

edge                 payloads    MB  ms/payload  windows
thinker -> code2wav         4  2.50        2.50        0

failures in                cause  requests
thinker      StageExecutionError         1"""
    assert format_stage_table([thinker, vocoder]) == expected


def test_a_pipeline_without_requests():
    assert format_stage_table([StageStats(stage_id=0, name="thinker")]).count("\n") == 1
