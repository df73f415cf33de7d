# SPDX-License-Identifier: Apache-2.0
"""Those who feed a stage: the orchestrator, or the stages whose outputs it reads. Belongs to the IO thread."""

from collections.abc import Callable
from pathlib import Path

import zmq

from vllm_omni.distributed.credit import Refund
from vllm_omni.distributed.messages import ORCHESTRATOR, DataMessage, Message, RefundMessage, SubmitMessage
from vllm_omni.stage.peers import Peer
from vllm_omni.stage.spec import StageSpec

Cost = tuple[int, int, int]
"""A feeder, and the requests and bytes that it spent."""


def cost_of(message: SubmitMessage | DataMessage) -> Cost:
    """What the sender spent on a message."""
    if isinstance(message, SubmitMessage):
        return ORCHESTRATOR, 1, message.payload.num_bytes
    return message.source, int(message.sequence == 0), message.payload.num_bytes


class Feeders:
    """Gives them back what they spent, and knows where they are."""

    def __init__(self, spec: StageSpec, context: zmq.Context, tell: Callable[[Message], None]) -> None:
        """
        Args:
            tell: Sends to the orchestrator.
        """
        self._stage_id = spec.stage.stage_id
        self._tell = tell
        self._sources = {
            source: Peer(context, Path(spec.run_dir), self._stage_id, source, source_spec.epoch)
            for source, source_spec in spec.sources.items()
        }
        self._refunds = {
            feeder: Refund(spec.max_queued, spec.high_watermark_bytes) for feeder in (ORCHESTRATOR, *spec.sources)
        }

    def __contains__(self, stage_id: int) -> bool:
        return stage_id in self._sources

    def connect(self, stage_id: int, epoch: int) -> None:
        self._sources[stage_id].connect(epoch)

    def disconnect(self, stage_id: int) -> None:
        self._sources[stage_id].disconnect()

    def refund(self, cost: Cost) -> None:
        """What was bought with it does not wait in this stage any more."""
        feeder, num_requests, num_bytes = cost
        self._refunds[feeder].add(num_requests, num_bytes)

    def send_refunds(self) -> None:
        """Tells them, where it is worth a message."""
        for feeder, refund in self._refunds.items():
            due = refund.take_due()
            if due is not None:
                message = RefundMessage(stage_id=self._stage_id, num_requests=due[0], num_bytes=due[1])
                send = self._tell if feeder == ORCHESTRATOR else self._sources[feeder].send
                send(message)
