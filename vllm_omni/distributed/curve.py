# SPDX-License-Identifier: Apache-2.0
"""Authentication and encryption between machines: ZeroMQ's CURVE, with keys of one pipeline.

All processes of a pipeline share two key pairs, one for sockets that bind and one for sockets that connect. A peer
without them gets no answer, and nothing that it sends is received.
"""

from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

MAX_MESSAGE = 256 << 20
"""Bytes of a message between machines, at most: ZeroMQ reads one of a stranger, too, before it knows whose it is.
Payloads that would make it larger are fetched."""


class CurveKeys(msgspec.Struct, frozen=True):
    """The key pairs, in ZeroMQ's text form (Z85)."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def make(cls) -> "CurveKeys":
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        return cls(*(key.decode() for key in pairs))

    def secure_server(self, socket: zmq.Socket) -> None:
        """Sets the keys of a socket before it binds; its context needs an `Authenticator`."""
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.server_public.encode(), self.server_secret.encode()

    def secure_client(self, socket: zmq.Socket) -> None:
        """Sets the keys of a socket before it connects."""
        socket.curve_serverkey = self.server_public.encode()
        socket.curve_publickey, socket.curve_secretkey = self.client_public.encode(), self.client_secret.encode()


class Authenticator:
    """Lets the sockets that bind in a context accept the pipeline's own peers only. Has a thread."""

    def __init__(self, context: zmq.Context, keys: CurveKeys) -> None:
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_OnlyPeers(keys))

    def stop(self) -> None:
        self._authenticator.stop()


class _OnlyPeers:
    def __init__(self, keys: CurveKeys) -> None:
        self._public = keys.client_public.encode()

    def callback(self, domain: str, key: bytes) -> Any:
        return key == self._public
