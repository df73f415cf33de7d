# SPDX-License-Identifier: Apache-2.0
"""A stage's connections to its neighbours, across restarts of their processes."""

import os
from pathlib import Path

import zmq

from vllm_omni.distributed.connectors import make_connector
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import Frames, Message, PayloadRef, PeerUpMessage, send
from vllm_omni.distributed.payloads import PayloadSender
from vllm_omni.distributed.run_dir import remove_unread
from vllm_omni.outputs import StageOutput, select_fields
from vllm_omni.stage.spec import TargetSpec

_LINGER_MS = 1000


def make_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """A socket without a high-water mark: credit limits what is sent."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.LINGER, _LINGER_MS)
    return sock


class Peer:
    """The connection to another stage.

    Attributes:
        epoch: That of the connected process; None while there is none.
    """

    def __init__(self, context: zmq.Context, own_id: int, stage_id: int) -> None:
        self.stage_id = stage_id
        self.epoch: int | None = None
        self._context = context
        self._own_id = own_id
        self._socket: zmq.Socket

    def connect(self, message: PeerUpMessage) -> None:
        """Connects to the stage's new process."""
        self.disconnect()
        self.epoch = message.epoch
        self._socket = make_socket(self._context, zmq.PUSH)
        self._socket.connect(message.address)

    def disconnect(self) -> None:
        """The process has died; messages that it has not read are lost."""
        if self.epoch is not None:
            self.epoch = None
            self._socket.close(linger=0)

    def send(self, message: Message, frames: Frames = ()) -> None:
        """Sends to the connected process. To be called only while there is one."""
        send(self._socket, message, frames, sender=self._own_id)


class Target(Peer):
    """A stage that reads this stage's output.

    Attributes:
        spec: What it reads, and how.
        credit: Limits what it is sent.
    """

    def __init__(self, context: zmq.Context, run_dir: Path, own_id: int, stage_id: int, spec: TargetSpec) -> None:
        self.spec = spec
        self.credit = Credit(spec.max_queued, spec.high_watermark_bytes)
        self._run_dir = run_dir
        self._payloads = PayloadSender(make_connector(spec.connector, run_dir, own_id, stage_id))
        self._reserved: set[str] = set()  # requests that were started, and of which nothing was sent
        super().__init__(context, own_id, stage_id)

    @property
    def takes_new_requests(self) -> bool:
        return self.epoch is not None and not self.credit.is_spent

    def connect(self, message: PeerUpMessage) -> None:
        """Connects to a process in which nothing waits yet."""
        super().connect(message)
        self.credit.reset()
        self.credit.spend(len(self._reserved), 0)

    def disconnect(self) -> None:
        if self.epoch is not None:
            super().disconnect()
            remove_unread(self._run_dir, os.getpid(), self._own_id, self.stage_id)

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
        payload, frames = self._payloads.put(select_fields(output, self.spec.reads))
        self._reserved.discard(request_id)  # The target returns the credit that was spent on it.
        self.credit.spend(0, payload.num_bytes)
        return payload, frames
