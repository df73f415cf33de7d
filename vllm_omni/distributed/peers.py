# SPDX-License-Identifier: Apache-2.0
"""Connections to the processes of stages, across their restarts."""

from pathlib import Path
from typing import Any

import zmq

from vllm_omni.config.stage_config import ConnectorConfig
from vllm_omni.distributed.connectors import PayloadSender, make_connector
from vllm_omni.distributed.messages import Frames, Message, PayloadRef, PeerUpMessage, send
from vllm_omni.distributed.network import Network

_LINGER_MS = 1000


def make_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """A socket without a high-water mark: credit limits what is sent."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.LINGER, _LINGER_MS)
    return sock


class Peer:
    """The connection to a replica of another stage.

    Attributes:
        epoch: That of the connected process; None while there is none.
    """

    def __init__(
        self, context: zmq.Context, own_id: int, own_epoch: int, instance_id: int, network: Network | None = None
    ) -> None:
        self.instance_id = instance_id
        self.epoch: int | None = None
        self._context = context
        self._own_id = own_id
        self._own_epoch = own_epoch
        self._network = network
        self._socket: zmq.Socket

    def connect(self, message: PeerUpMessage) -> None:
        """Connects to the stage's new process."""
        self.disconnect()
        self.epoch = message.epoch
        self._socket = make_socket(self._context, zmq.PUSH)
        if not message.is_local:
            assert self._network is not None
            self._network.secure(self._socket)
        self._socket.connect(message.address)

    def disconnect(self) -> None:
        """The process has died; messages that it has not read are lost."""
        if self.epoch is not None:
            self.epoch = None
            self._socket.close(linger=0)

    def send(self, message: Message, frames: Frames = ()) -> None:
        """Sends to the connected process. To be called only while there is one."""
        send(self._socket, message, frames, sender=self._own_id, epoch=self._own_epoch)


class PayloadPeer(Peer):
    """A peer that is also sent payloads: through shared memory on this machine, through the network to another one.

    Attributes:
        is_local: Whether the connected process is on this machine.
    """

    def __init__(
        self, context: zmq.Context, run_dir: Path, own_id: int, own_epoch: int, instance_id: int,
        connector: ConnectorConfig, network: Network | None,
    ) -> None:  # fmt: skip
        super().__init__(context, own_id, own_epoch, instance_id, network)
        self._local = PayloadSender(make_connector(connector, run_dir, own_id, instance_id))
        self._remote = None
        if network is not None:
            self._remote = PayloadSender(network.connector(instance_id, connector))
        self._payloads = self._local
        self.is_local = True

    def connect(self, message: PeerUpMessage) -> None:
        super().connect(message)
        self.is_local = message.is_local
        if message.is_local:
            self._payloads = self._local
        else:
            assert self._remote is not None
            self._payloads = self._remote

    def disconnect(self) -> None:
        if self.epoch is not None:
            super().disconnect()
            for sender in (self._local, self._remote):
                if sender is not None:
                    sender.remove_unread()

    def put_payload(self, value: Any) -> tuple[PayloadRef, Frames]:
        """Makes a payload available to the connected process. Raises as `PayloadSender.put`."""
        return self._payloads.put(value)

    def encode(self, value: Any) -> Frames:
        """The buffers of a payload for `put_buffers`. See `PayloadSender.encode`."""
        return self._payloads.encode(value)

    def put_buffers(self, buffers: Frames) -> tuple[PayloadRef, Frames]:
        """Makes an encoded payload available to the connected process. See `PayloadSender.put_buffers`."""
        return self._payloads.put_buffers(buffers)
