# SPDX-License-Identifier: Apache-2.0
"""A stage's connection to one that reads its output."""

from pathlib import Path

import zmq

from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import Frames, PayloadRef, PeerUpMessage
from vllm_omni.distributed.network import Network
from vllm_omni.distributed.peers import PayloadPeer
from vllm_omni.outputs import StageOutput, select_fields
from vllm_omni.stage.spec import TargetSpec


class Target(PayloadPeer):
    """A stage that reads this stage's output.

    Attributes:
        spec: What it reads, and how.
        credit: Limits what it is sent.
    """

    def __init__(
        self, context: zmq.Context, run_dir: Path, own_id: int, own_epoch: int, instance_id: int, spec: TargetSpec,
        network: Network | None = None,
    ) -> None:  # fmt: skip
        super().__init__(context, run_dir, own_id, own_epoch, instance_id, spec.connector, network)
        self.spec = spec
        self.credit = Credit(spec.max_queued, spec.high_watermark_bytes)
        self._reserved: set[str] = set()  # requests that were started, and of which nothing was sent

    @property
    def takes_new_requests(self) -> bool:
        return self.epoch is not None and not self.credit.is_spent

    def connect(self, message: PeerUpMessage) -> None:
        """Connects to a process in which nothing waits yet."""
        super().connect(message)
        self.credit.reset()
        self.credit.spend(len(self._reserved), 0)

    def reserve(self, request_id: str) -> None:
        """A request is started; its output will be sent."""
        self._reserved.add(request_id)
        self.credit.spend(1, 0)

    def unreserve(self, request_id: str) -> None:
        """Nothing will be sent of the request. No effect if something was sent, or nothing was reserved."""
        if request_id in self._reserved:
            self._reserved.remove(request_id)
            self.credit.refund(1, 0)

    def put(self, request_id: str, output: StageOutput) -> tuple[PayloadRef, Frames]:
        """Makes the fields of an output that the target reads available to it; spends credit."""
        payload, frames = self.put_payload(select_fields(output, self.spec.reads))
        self._reserved.discard(request_id)  # The target returns the credit that was spent on it.
        self.credit.spend(0, payload.num_bytes)
        return payload, frames
