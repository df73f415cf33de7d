# SPDX-License-Identifier: Apache-2.0
"""When a stage returns credit to its sources, with fake sockets."""

import pytest

from tests.stage.fake_sockets import FakeContext
from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, StageInstance, WindowConfig
from vllm_omni.distributed.messages import (
    ORCHESTRATOR,
    DataMessage,
    InlineRef,
    Message,
    PeerUpMessage,
    RefundMessage,
    SubmitMessage,
    recv_at_stage,
)
from vllm_omni.stage.sources import Sources, cost_of
from vllm_omni.stage.spec import SourceSpec, StageSpec

SOURCE, OTHER = 0, 1


class Stage:
    """The sources of stage 2, which reads two stages; up to 8 requests and 1000 bytes may wait in it."""

    def __init__(self) -> None:
        self.context = FakeContext()
        self.to_orchestrator: list[Message] = []
        spec = StageSpec(
            instance=StageInstance(instance_id=2, replica=0, stage=OmniStageConfig(stage_id=2)),
            run_dir="",
            orchestrator=PeerUpMessage(instance_id=-1, epoch=0, address=""),
            connector=ConnectorConfig(name="InlineConnector"),
            sources={source: SourceSpec(stage_id=source, window=WindowConfig()) for source in (SOURCE, OTHER)},
            max_queued=8,
            high_watermark_bytes=1000,
        )
        self.sources = Sources(spec, self.context, self.to_orchestrator.append)  # type: ignore[arg-type]

    def connect(self, source: int, epoch: int = 0) -> None:
        self.sources.connect(PeerUpMessage(instance_id=source, epoch=epoch, address=f"{source}.{epoch}"))

    def refunds(self, source: int, epoch: int = 0) -> list[tuple[int, int]]:
        """Requests and bytes that a source's process has received since the last call."""
        self.sources.send_refunds()
        messages = [message for message, _ in self.context.read(f"{source}.{epoch}", recv_at_stage)]
        assert all(isinstance(message, RefundMessage) and message.instance_id == 2 for message in messages)
        return [(message.num_requests, message.num_bytes) for message in messages]


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.connect(SOURCE)
    stage.connect(OTHER)
    return stage


def data(sequence: int, num_bytes: int) -> DataMessage:
    return DataMessage(
        request_id="r",
        number=1,
        source=SOURCE,
        sequence=sequence,
        is_last=False,
        sent=0.0,
        payload=InlineRef(sizes=[num_bytes - 1, 1]),
    )


def test_a_request_costs_one_with_its_first_message() -> None:
    submit = SubmitMessage(
        request_id="r", number=1, sources=[], targets=[], is_final=True, streams=False, payload=InlineRef(sizes=[7])
    )
    assert cost_of(submit) == (ORCHESTRATOR, 1, 7)
    assert [cost_of(data(sequence, 5)) for sequence in range(3)] == [(SOURCE, 1, 5), (SOURCE, 0, 5), (SOURCE, 0, 5)]


def test_credit_is_returned_in_quarters(stage: Stage) -> None:
    stage.sources.refund((SOURCE, 1, 10))
    assert stage.refunds(SOURCE) == []
    stage.sources.refund((SOURCE, 1, 10))
    assert stage.refunds(SOURCE) == [(2, 20)]
    assert stage.refunds(SOURCE) == []
    stage.sources.refund((SOURCE, 0, 249))
    assert stage.refunds(SOURCE) == []
    stage.sources.refund((SOURCE, 0, 1))
    assert stage.refunds(SOURCE) == [(0, 250)]


def test_each_feeder_gets_its_own_credit(stage: Stage) -> None:
    stage.sources.refund((SOURCE, 2, 1))
    stage.sources.refund((OTHER, 3, 2))
    stage.sources.refund((ORCHESTRATOR, 4, 3))
    assert (stage.refunds(SOURCE), stage.refunds(OTHER)) == ([(2, 1)], [(3, 2)])
    assert stage.to_orchestrator == [RefundMessage(instance_id=2, num_requests=4, num_bytes=3)]


def test_a_source_that_is_not_connected_gets_its_credit_later() -> None:
    stage = Stage()
    stage.sources.refund((SOURCE, 5, 10))
    assert stage.refunds(SOURCE) == []
    stage.connect(SOURCE)
    assert stage.refunds(SOURCE) == [(5, 10)]


def test_a_new_process_gets_no_credit_of_the_dead_one(stage: Stage) -> None:
    stage.sources.refund((SOURCE, 1, 10))
    stage.sources.disconnect(SOURCE)
    stage.sources.refund((OTHER, 2, 0))
    assert stage.refunds(OTHER) == [(2, 0)], "the others are not affected"
    stage.connect(SOURCE, epoch=1)
    stage.sources.refund((SOURCE, 2, 0))
    assert stage.refunds(SOURCE, epoch=1) == [(2, 0)] and stage.refunds(SOURCE) == []


def test_only_sources_are_members(stage: Stage) -> None:
    assert SOURCE in stage.sources and OTHER in stage.sources
    assert 2 not in stage.sources and ORCHESTRATOR not in stage.sources
