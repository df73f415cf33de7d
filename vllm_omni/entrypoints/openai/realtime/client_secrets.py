# SPDX-License-Identifier: Apache-2.0
"""Ephemeral keys: a browser opens a session with one, and never sees the server's key."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from vllm_omni.errors import PipelineFullError

PREFIX = "ek_"
SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."
"""How a browser, which cannot set headers of a WebSocket, sends a key."""

MIN_S, DEFAULT_S, MAX_S = 10, 600, 7200
"""Seconds that a key is valid."""
MAX_SECRETS, MAX_SECRET_BYTES = 10_000, 64 << 20
"""Keys that one API key may have made, and bytes of their configurations."""
MAX_TOTAL_SECRET_BYTES = 512 << 20
"""Bytes of the configurations of all."""


@dataclass(frozen=True)
class ClientSecret:
    """
    Attributes:
        value: The key.
        expires_at: In seconds since 1970, for the client.
        deadline: The same in `time.monotonic()` seconds, which no clock that is set moves.
        owner: See `RequestContext`; of the request that made it.
        values: The configuration that its sessions start with.
        num_bytes: Of `values`, as JSON.
    """

    value: str
    expires_at: int
    deadline: float
    owner: bytes
    values: dict[str, Any]
    num_bytes: int


class ClientSecrets:
    """The keys that are valid, oldest first. For the event loop."""

    def __init__(self) -> None:
        self._secrets: dict[str, ClientSecret] = {}

    def create(self, seconds: int, owner: bytes, values: dict[str, Any]) -> ClientSecret:
        """A new key; the owner's oldest ones go if there are too many, or if they are too large.

        Raises:
            PipelineFullError: Those of all owners are too large.
        """
        now = time.monotonic()
        for value in [value for value, secret in self._secrets.items() if secret.deadline <= now]:
            del self._secrets[value]
        num_bytes = len(msgspec.json.encode(values))
        if num_bytes + sum(secret.num_bytes for secret in self._secrets.values()) > MAX_TOTAL_SECRET_BYTES:
            raise PipelineFullError("the configurations of all client secrets are too large; try again later", MIN_S)
        value = PREFIX + secrets.token_urlsafe(32)
        made = ClientSecret(value, int(time.time()) + seconds, now + seconds, owner, values, num_bytes)
        self._secrets[made.value] = made
        own = [secret for secret in self._secrets.values() if secret.owner == owner]
        total = sum(secret.num_bytes for secret in own)
        for number, secret in enumerate(own[:-1]):
            if len(own) - number > MAX_SECRETS or total > MAX_SECRET_BYTES:
                total -= secret.num_bytes
                del self._secrets[secret.value]
        return made

    def find(self, key: str) -> ClientSecret | None:
        """The key, if it is one of these and valid."""
        secret = self._secrets.get(key)
        return secret if secret is not None and secret.deadline > time.monotonic() else None


def sent_key(scope: Scope) -> str:
    """The key of a request, from its header or the subprotocols of a WebSocket; empty if there is none."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key
    if key := headers.get("X-Api-Key", ""):  # as Anthropic's clients send it
        return key
    offered = [name for name in scope.get("subprotocols", ()) if name.startswith(KEY_SUBPROTOCOL)]
    return offered[0].removeprefix(KEY_SUBPROTOCOL) if offered else ""
