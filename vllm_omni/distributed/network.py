# SPDX-License-Identifier: Apache-2.0
"""The sockets of a process for the processes of a pipeline on other machines. Belongs to one thread."""

import msgspec
import zmq

from vllm_omni.config.stage_config import NIXL, ConnectorConfig
from vllm_omni.distributed.connectors.network import NetworkConnector, PayloadFetcher, PayloadServer
from vllm_omni.distributed.connectors.nixl import NixlAgent
from vllm_omni.distributed.curve import Authenticator, CurveKeys

_HEARTBEAT_MS = 500
_HEARTBEAT_TIMEOUT_MS = 2000


class NetworkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        host: This machine's address for the others, and the one to bind to.
        keys: Of the pipeline.
        encrypts_payloads: False: payloads of 64 KiB or more are sent as they are; messages are always encrypted.
        uses_nixl: For some of them.
    """

    host: str
    keys: CurveKeys
    encrypts_payloads: bool = True
    uses_nixl: bool = False


class Network:
    """
    Attributes:
        inbound: Receives messages.
        address: Of `inbound`.
        server, fetcher: Of payloads.
    """

    def __init__(self, context: zmq.Context, spec: NetworkSpec) -> None:
        self._context = context
        self._keys = spec.keys
        self._authenticator = Authenticator(context, spec.keys)
        keys = spec.keys if spec.encrypts_payloads else None
        self._nixl = NixlAgent() if spec.uses_nixl else None
        self.server = PayloadServer(context, spec.host, keys, self._nixl)
        self.fetcher = PayloadFetcher(context, keys, self._nixl)
        self.inbound = context.socket(zmq.PULL)
        self.inbound.setsockopt(zmq.RCVHWM, 0)
        self.inbound.setsockopt(zmq.LINGER, 0)
        spec.keys.secure_server(self.inbound)
        self.address = f"tcp://{spec.host}:{self.inbound.bind_to_random_port(f'tcp://{spec.host}')}"

    def secure(self, socket: zmq.Socket) -> None:
        """Sets the keys of a socket before it connects to the `inbound` of another process."""
        self._keys.secure_client(socket)
        # Without them a link that is cut is reported by nobody.
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)

    def connector(self, receiver: int, config: ConnectorConfig) -> NetworkConnector:
        """A connector for payloads to a process on another machine."""
        return NetworkConnector(self.server, receiver, config.shm_threshold_bytes, config.name == NIXL)

    def close(self) -> None:
        """Closes the sockets. It is called before the context is closed."""
        self._authenticator.stop()
        if self._nixl is not None:
            self._nixl.close()
