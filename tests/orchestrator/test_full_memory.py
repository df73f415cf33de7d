# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose memory file system is too small for its payloads."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.orchestrator.pipelines import Caller, fake_stage, make_config, open_orchestrator, opened
from tests.small_file_system import small_file_system
from vllm_omni.distributed import run_dir
from vllm_omni.events import CompletedEvent
from vllm_omni.metrics.timeline import Timeline

MB = 1 << 20
CONFIG = make_config(fake_stage(0, "a", (), "text"), fake_stage(1, "b", (0,), "audio"), max_inflight=8)


def fill(folder: Path) -> Path:
    """A file that takes all that is left."""
    path = folder / "rest"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    assert shutil.disk_usage(folder).free == 0
    return path


def test_a_memory_file_system_that_fills_while_a_stage_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = fake_stage(1, "b", (0,), "audio")
    slow |= {"engine_type": "function", "function": "tests.orchestrator.slow_to_load.speak"}
    config = make_config(fake_stage(0, "a", (), "text"), slow)
    with small_file_system(16 * MB) as folder:
        monkeypatch.setattr(run_dir, "MEMORY_FILE_SYSTEM", folder)
        orchestrator = open_orchestrator(config)
        try:
            rest = fill(folder)
            assert orchestrator.health()[1].state == "starting"
            orchestrator.wait_until_started()
            caller = Caller(orchestrator, config)
            for _ in range(2):
                caller.submit("p" * MB, fake_bytes=MB, size=2 * MB)
                end = caller.wait_one()
                assert isinstance(end, CompletedEvent), end
                assert end.outputs[1].multimodal_output["bytes"].shape == (2 * MB,)
                del end  # and with it, memory of the file system
                rest.unlink(missing_ok=True)  # From now on there is room.
        finally:
            orchestrator.close()
        assert shutil.disk_usage(folder).used == 0


def test_a_full_disk_without_a_memory_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of the pipeline are on it, and its timeline."""
    with small_file_system(MB) as folder:
        monkeypatch.setattr(run_dir, "MEMORY_FILE_SYSTEM", Path("/nowhere"))
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        timeline = Timeline(folder / "trace.json", CONFIG)
        fill(folder)
        with opened(CONFIG, observers=[timeline]) as caller:
            for _ in range(2):
                caller.submit("p" * MB, fake_bytes=MB)
                assert isinstance(caller.wait_one(), CompletedEvent)


def test_requests_are_completed_on_a_full_memory_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_file_system(MB) as folder:
        monkeypatch.setattr(run_dir, "MEMORY_FILE_SYSTEM", folder)
        with opened(CONFIG) as caller:
            request_ids = [caller.submit("p" * MB, fake_bytes=size * MB // 4) for size in (1, 2, 3, 8, 12, 3, 1)]
            ends = caller.wait(len(request_ids))
        for request_id in request_ids:
            end = ends[request_id]
            assert isinstance(end, CompletedEvent), end
            assert end.outputs[1].multimodal_output["bytes"].unique().tolist() == [1]
        assert shutil.disk_usage(folder).used == 0
