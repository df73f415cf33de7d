# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose memory file system is too small for its payloads."""

import shutil

import pytest

from tests.orchestrator.pipelines import Caller, fake_stage, make_config, open_orchestrator
from tests.small_file_system import small_file_system
from vllm_omni.distributed import run_dir
from vllm_omni.events import CompletedEvent

MB = 1 << 20
CONFIG = make_config(fake_stage(0, "a", (), "text"), fake_stage(1, "b", (0,), "audio"), max_inflight=8)


def test_requests_are_completed_on_a_full_memory_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_file_system(MB) as folder:
        monkeypatch.setattr(run_dir, "_MEMORY_FILE_SYSTEM", folder)
        orchestrator = open_orchestrator(CONFIG)
        try:
            orchestrator.wait_until_started()
            caller = Caller(orchestrator, CONFIG)
            request_ids = [caller.submit("p" * MB, fake_bytes=size * MB // 4) for size in (1, 2, 3, 8, 12, 3, 1)]
            ends = caller.wait(len(request_ids))
        finally:
            orchestrator.close()
        for request_id in request_ids:
            end = ends[request_id]
            assert isinstance(end, CompletedEvent), end
            assert end.outputs[1].multimodal_output["bytes"].unique().tolist() == [1]
        assert shutil.disk_usage(folder).used == 0
