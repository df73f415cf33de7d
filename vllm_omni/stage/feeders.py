# SPDX-License-Identifier: Apache-2.0
"""The feeders of a stage: the orchestrator, or the stages whose outputs it reads. Belongs to the IO thread."""

from collections.abc import Callable

import zmq

from vllm_omni.distributed.credit import Refund
from vllm_omni.distributed.messages import (
    ORCHESTRATOR,
    DataMessage,
    Message,
    PeerUpMessage,
    RefundMessage,
    SubmitMessage,
)
from vllm_omni.distributed.network import Network
from vllm_omni.distributed.peers import Peer
from vllm_omni.stage.spec import StageSpec

Cost = tuple[int, int, int]
"""A feeder, and the requests and bytes of credit that it spent."""


def cost_of(message: SubmitMessage | DataMessage) -> Cost:
    """The credit that the sender spent on a message."""
    if isinstance(message, SubmitMessage):
        return ORCHESTRATOR, 1, message.payload.num_bytes
    return message.source, int(message.sequence == 0), message.payload.num_bytes


class Feeders:
    """Returns their credit."""

    def __init__(
        self, spec: StageSpec, context: zmq.Context, send: Callable[[Message], None], network: Network | None = None
    ) -> None:
        """
        Args:
            send: Sends to the orchestrator.
            network: For sources on other machines; None: there are none.
        """
        self._instance_id = spec.instance.instance_id
        self._send = send
        self._sources = {
            source: Peer(context, self._instance_id, spec.epoch, source, network) for source in spec.sources
        }
        self._refunds = {
            feeder: Refund(spec.max_queued, spec.high_watermark_bytes) for feeder in (ORCHESTRATOR, *spec.sources)
        }

    def __contains__(self, instance_id: int) -> bool:
        return instance_id in self._sources

    def connect(self, message: PeerUpMessage) -> None:
        self._sources[message.instance_id].connect(message)

    def disconnect(self, instance_id: int) -> None:
        self._sources[instance_id].disconnect()
        self._refunds[instance_id].reset()

    def refund(self, cost: Cost) -> None:
        """A request or its data does not wait in this stage any more."""
        feeder, num_requests, num_bytes = cost
        self._refunds[feeder].add(num_requests, num_bytes)

    def send_refunds(self) -> None:
        """Sends the credit that is due. A source whose data arrives before its `PeerUpMessage` gets it later."""
        for feeder, refund in self._refunds.items():
            if feeder != ORCHESTRATOR and self._sources[feeder].epoch is None:
                continue
            due = refund.take_due()
            if due is not None:
                message = RefundMessage(instance_id=self._instance_id, num_requests=due[0], num_bytes=due[1])
                send = self._send if feeder == ORCHESTRATOR else self._sources[feeder].send
                send(message)
