# SPDX-License-Identifier: Apache-2.0
"""A stage's connections to its neighbours, across the deaths and restarts of these."""

import os
from pathlib import Path

import zmq

from vllm_omni.distributed.connectors import ThresholdConnector
from vllm_omni.distributed.credit import Credit
from vllm_omni.distributed.messages import Frames, Message, PayloadRef, send
from vllm_omni.distributed.payload_channel import PayloadChannel
from vllm_omni.distributed.run_dir import payload_prefix, remove_unread, stage_address
from vllm_omni.outputs import StageOutput, select_fields
from vllm_omni.stage.spec import TargetSpec

_LINGER_MS = 1000
_RECONNECT_MS = 10
"""Peers start at the same time, so the first attempt to connect may come too early."""


def make_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """A socket without a limit of its own: credit bounds what is sent."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.LINGER, _LINGER_MS)
    sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    return sock


class Peer:
    """The way to another stage. `epoch` is that of the process at its end, None while there is none."""

    def __init__(self, context: zmq.Context, run_dir: Path, own_id: int, stage_id: int, epoch: int | None) -> None:
        self.stage_id = stage_id
        self.epoch: int | None = None
        self._context = context
        self._run_dir = run_dir
        self._own_id = own_id
        self._socket: zmq.Socket
        if epoch is not None:
            self.connect(epoch)

    def connect(self, epoch: int) -> None:
        """Connects to the stage's process of this epoch."""
        self.disconnect()
        self.epoch = epoch
        self._socket = make_socket(self._context, zmq.PUSH)
        self._socket.connect(stage_address(self._run_dir, self.stage_id, epoch))

    def disconnect(self) -> None:
        """The process is gone, and with it whatever it had not read."""
        if self.epoch is not None:
            self.epoch = None
            self._socket.close(linger=0)

    def send(self, message: Message, frames: Frames = ()) -> None:
        """Sends to the process at the other end; does nothing while there is none."""
        if self.epoch is not None:
            send(self._socket, message, frames, sender=self._own_id)


class Target(Peer):
    """A stage that reads this stage's output.

    Attributes:
        spec: What it reads, and how.
        credit: What it may be sent.
    """

    def __init__(self, context: zmq.Context, run_dir: Path, own_id: int, stage_id: int, spec: TargetSpec) -> None:
        self.spec = spec
        self.credit = Credit(spec.max_queued, spec.high_watermark_bytes)
        prefix = payload_prefix(os.getpid(), own_id, stage_id)
        self._channel = PayloadChannel(ThresholdConnector(run_dir, prefix, spec.shm_threshold_bytes))
        self._reserved: set[str] = set()  # requests that were begun with, and of which nothing was sent
        super().__init__(context, run_dir, own_id, stage_id, spec.epoch)

    @property
    def takes_new_requests(self) -> bool:
        return self.epoch is not None and not self.credit.is_spent

    def connect(self, epoch: int) -> None:
        """Connects to a process in which nothing waits yet."""
        super().connect(epoch)
        self.credit.reset()
        self.credit.spend(len(self._reserved), 0)

    def disconnect(self) -> None:
        if self.epoch is not None:
            super().disconnect()
            remove_unread(self._run_dir, os.getpid(), self._own_id, self.stage_id)

    def reserve(self, request_id: str) -> None:
        """A request is begun with, whose output will be sent."""
        self._reserved.add(request_id)
        self.credit.spend(1, 0)

    def unreserve(self, request_id: str) -> None:
        """Nothing will be sent of the request. Harmless if something was, or nothing was to be."""
        if request_id in self._reserved:
            self._reserved.remove(request_id)
            self.credit.refund(1, 0)

    def put(self, request_id: str, output: StageOutput) -> tuple[PayloadRef, Frames]:
        """Makes the part of an output that the target reads available to it, at the cost of credit."""
        payload, frames = self._channel.put(select_fields(output, self.spec.reads))
        self._reserved.discard(request_id)  # What was spent on it the target will give back.
        self.credit.spend(0, payload.num_bytes)
        return payload, frames
