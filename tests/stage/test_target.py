# SPDX-License-Identifier: Apache-2.0
"""Credit and payloads of a stage whose target dies and restarts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from tests.stage.running_engine import PATIENCE
from vllm_omni.config.stage_config import ConnectorConfig, WindowConfig
from vllm_omni.distributed.messages import AbortMessage, PeerUpMessage, recv_at_stage
from vllm_omni.distributed.run_dir import stage_address
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.output_sender import Target
from vllm_omni.stage.spec import TargetSpec

OUTPUT = StageOutput(request_id="r", stage_id=0, tensors={"x": torch.zeros(1000)})


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def peer_up(run_dir: Path, epoch: int = 0) -> PeerUpMessage:
    return PeerUpMessage(instance_id=1, epoch=epoch, address=stage_address(run_dir, 1, epoch))


def make_target(context: zmq.Context, run_dir: Path) -> Target:
    connector = ConnectorConfig(name="SharedMemoryConnector", extra={"shm_threshold_bytes": 512})
    spec = TargetSpec(
        window=WindowConfig(), reads=None, max_queued=2, high_watermark_bytes=1 << 20, connector=connector
    )
    return Target(context, run_dir, 0, 0, 1, spec)


def test_payloads_that_a_dead_stage_has_not_received_are_removed(context: zmq.Context, tmp_path: Path) -> None:
    target = make_target(context, tmp_path)
    target.connect(peer_up(tmp_path))
    target.put("r", OUTPUT)
    assert list(tmp_path.glob("payload-*-to1-*"))
    target.disconnect()
    assert not list(tmp_path.glob("payload-*"))


def test_reserved_requests_count_in_the_next_process_too(context: zmq.Context, tmp_path: Path) -> None:
    target = make_target(context, tmp_path)
    target.connect(peer_up(tmp_path))
    target.reserve("sent")
    target.put("sent", OUTPUT)
    target.reserve("to come")
    assert not target.takes_new_requests
    target.disconnect()
    target.connect(peer_up(tmp_path, epoch=1))
    assert target.takes_new_requests, "the dead process does not return the credit of what it was sent"
    target.reserve("another")
    assert not target.takes_new_requests, "two are to come"
    target.unreserve("to come")
    assert target.takes_new_requests
    target.unreserve("to come")
    target.put("another", OUTPUT)
    target.unreserve("another")
    target.reserve("third")
    assert not target.takes_new_requests, "only the stage returns the credit of what it was sent"


def test_a_target_takes_requests_when_its_address_is_known(context: zmq.Context, tmp_path: Path) -> None:
    target = make_target(context, tmp_path)
    assert not target.takes_new_requests
    inbound = context.socket(zmq.PULL)
    inbound.bind(stage_address(tmp_path, 1, 3))
    target.connect(peer_up(tmp_path, epoch=3))
    assert target.takes_new_requests
    target.send(AbortMessage(request_ids=["r"]))
    assert inbound.poll(PATIENCE * 1000)
    received = recv_at_stage(inbound)
    assert received is not None and received[0] == AbortMessage(request_ids=["r"])
