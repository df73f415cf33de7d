# SPDX-License-Identifier: Apache-2.0
"""What a stage owes and is owed when a stage that it feeds dies and comes back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.distributed.messages import AbortMessage, recv_at_stage
from vllm_omni.distributed.run_dir import stage_address
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.peers import Target
from vllm_omni.stage.spec import TargetSpec

OUTPUT = StageOutput(request_id="r", stage_id=0, tensors={"x": torch.zeros(1000)})


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def make_target(context: zmq.Context, run_dir: Path, epoch: int | None = 0, max_queued: int = 2) -> Target:
    spec = TargetSpec(
        epoch=epoch,
        window=WindowConfig(),
        reads=None,
        max_queued=max_queued,
        high_watermark_bytes=1 << 20,
        shm_threshold_bytes=512,
    )
    return Target(context, run_dir, 0, 1, spec)


def test_what_a_dead_stage_has_not_taken_is_removed(context: zmq.Context, tmp_path: Path) -> None:
    target = make_target(context, tmp_path)
    target.put("r", OUTPUT)
    assert list(tmp_path.glob("payload-*-to1-*"))
    target.disconnect()
    assert not list(tmp_path.glob("payload-*"))


def test_what_was_begun_with_counts_in_the_next_process_too(context: zmq.Context, tmp_path: Path) -> None:
    target = make_target(context, tmp_path)
    target.reserve("sent")
    target.put("sent", OUTPUT)
    target.reserve("to come")
    assert not target.takes_new_requests
    target.disconnect()
    target.connect(1)
    assert target.takes_new_requests, "the dead one will not give back what it was sent"
    target.reserve("another")
    assert not target.takes_new_requests, "two are to come"
    target.unreserve("to come")
    assert target.takes_new_requests
    target.unreserve("to come")
    target.put("another", OUTPUT)
    target.unreserve("another")
    target.reserve("third")
    assert not target.takes_new_requests, "what was sent is given back by the stage, and by nobody else"


def test_nothing_is_sent_to_a_stage_before_word_of_it(context: zmq.Context, tmp_path: Path) -> None:
    target = make_target(context, tmp_path, epoch=None)
    assert not target.takes_new_requests
    target.send(AbortMessage(request_ids=["lost"]))
    inbound = context.socket(zmq.PULL)
    inbound.bind(stage_address(tmp_path, 1, 3))
    target.connect(3)
    assert target.takes_new_requests
    target.send(AbortMessage(request_ids=["r"]))
    assert inbound.poll(5000)
    received = recv_at_stage(inbound)
    assert received is not None and received[0] == AbortMessage(request_ids=["r"])
