# SPDX-License-Identifier: Apache-2.0
"""What a stage holds of an output that it has sent."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, WindowConfig
from vllm_omni.distributed.messages import InlineRef, SubmitMessage
from vllm_omni.distributed.run_dir import orchestrator_address
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.outlet import Outlet
from vllm_omni.stage.spec import StageSpec, TargetSpec

INLINE = ConnectorConfig(name="InlineConnector")
IN_WINDOWS, WHOLE = 1, 2  # stages that read the output


@pytest.fixture
def outlet(tmp_path: Path) -> Iterator[Outlet]:
    windows = {IN_WINDOWS: WindowConfig(window_size=2, first_window_size=2, unit="rows"), WHOLE: WindowConfig()}
    targets = {
        stage_id: TargetSpec(window=window, reads=None, max_queued=1, high_watermark_bytes=1, connector=INLINE)
        for stage_id, window in windows.items()
    }
    stage = OmniStageConfig(stage_id=0, final_output=True, final_output_type="audio")
    context = zmq.Context()
    orchestrator = orchestrator_address(tmp_path)
    spec = StageSpec(stage=stage, run_dir=str(tmp_path), orchestrator=orchestrator, connector=INLINE, targets=targets)
    yield Outlet(spec, context)
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("targets", "is_final", "streams", "num_held"),
    [
        ([IN_WINDOWS], True, True, 0),
        ([IN_WINDOWS], False, False, 0),
        ([], True, True, 0),
        ([], True, False, 10),
        ([IN_WINDOWS], True, False, 10),
        ([IN_WINDOWS, WHOLE], True, True, 10),
    ],
)
def test_what_was_sent_is_held_only_for_those_who_read_it_whole(
    outlet: Outlet, targets: list[int], is_final: bool, streams: bool, num_held: int
) -> None:
    submit = SubmitMessage(
        request_id="r",
        number=1,
        sources=[],
        targets=targets,
        is_final=is_final,
        streams=streams,
        payload=InlineRef(sizes=[]),
    )
    output, rows = outlet.output_stream(submit), []
    for _ in range(10):
        made = torch.ones(2, 4)
        rows.append(weakref.ref(made))
        assert output.add(StageOutput(request_id="r", stage_id=0, tensors={"rows": made})) is not None
        del made
    gc.collect()
    assert sum(made() is not None for made in rows) == num_held
    segment, whole = output.finish(StageOutput(request_id="r", stage_id=0, tensors={"rows": torch.ones(1, 4)}))
    assert len(segment.tensors["rows"]) == 1
    if num_held:
        assert len(whole.tensors["rows"]) == 21
