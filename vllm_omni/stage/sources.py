# SPDX-License-Identifier: Apache-2.0
"""The sources of a stage: the orchestrator, or the stages whose outputs it reads. Belongs to the IO thread."""

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
"""A source, and the requests and bytes of credit that it spent."""


def cost_of(message: SubmitMessage | DataMessage) -> Cost:
    """The credit that the sender spent on a message."""
    if isinstance(message, SubmitMessage):
        return ORCHESTRATOR, 1, message.payload.num_bytes
    return message.source, int(message.sequence == 0), message.payload.num_bytes


class Sources:
    """Connections to the sources of a stage, for the credit that it returns to them."""

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
        self._peers = {source: Peer(context, self._instance_id, spec.epoch, source, network) for source in spec.sources}
        self._refunds = {
            source: Refund(spec.max_queued, spec.high_watermark_bytes) for source in (ORCHESTRATOR, *spec.sources)
        }

    def __contains__(self, instance_id: int) -> bool:
        return instance_id in self._peers

    def connect(self, message: PeerUpMessage) -> None:
        self._peers[message.instance_id].connect(message)

    def disconnect(self, instance_id: int) -> None:
        self._peers[instance_id].disconnect()
        self._refunds[instance_id].reset()

    def refund(self, cost: Cost) -> None:
        """A request or its data does not wait in this stage any more."""
        source, num_requests, num_bytes = cost
        self._refunds[source].add(num_requests, num_bytes)

    def send_refunds(self) -> None:
        """Sends the credit that is due. A source whose data arrives before its `PeerUpMessage` gets it later."""
        for source, refund in self._refunds.items():
            if source != ORCHESTRATOR and self._peers[source].epoch is None:
                continue
            due = refund.take_due()
            if due is not None:
                message = RefundMessage(instance_id=self._instance_id, num_requests=due[0], num_bytes=due[1])
                send = self._send if source == ORCHESTRATOR else self._peers[source].send
                send(message)
