# SPDX-License-Identifier: Apache-2.0
"""What is removed of a dead stage's files, and what somebody may still read."""

from pathlib import Path

import pytest

from vllm_omni.orchestrator.run_dir import RunDir, payload_prefix, remove_unread

NAMES = {
    "to it": f"{payload_prefix(7, 0, 1)}-0",
    "to it from the orchestrator": f"{payload_prefix(6, -1, 1)}-3",
    "its own": f"{payload_prefix(8, 1, 2)}-0",
    "its own to the orchestrator": f"{payload_prefix(8, 1, -1)}-0",
    "its segment": f"pool-{payload_prefix(8, 1, 2)}-0",
    "a segment for it": f"pool-{payload_prefix(7, 0, 1)}-0",
    "of others": f"{payload_prefix(7, 0, 11)}-0",
    "to the orchestrator": f"{payload_prefix(9, 11, -1)}-0",
}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir()
    run_dir.remove()
    run_dir.path = tmp_path
    for name in NAMES.values():
        (tmp_path / name).touch()
    return run_dir


def left(run_dir: RunDir) -> set[str]:
    return {what for what, name in NAMES.items() if (run_dir.path / name).exists()}


def test_payloads_of_a_stage_that_comes_back(run_dir: RunDir) -> None:
    run_dir.remove_payloads(1)
    assert left(run_dir) == {"its segment", "a segment for it", "of others", "to the orchestrator"}


def test_what_a_dead_stage_sent_can_still_be_read(run_dir: RunDir) -> None:
    run_dir.remove_segments(1)
    assert left(run_dir) == NAMES.keys() - {"its segment"}


def test_what_was_sent_to_a_dead_stage(run_dir: RunDir) -> None:
    remove_unread(run_dir.path, 7, 0, 1)
    assert left(run_dir) == NAMES.keys() - {"to it"}
