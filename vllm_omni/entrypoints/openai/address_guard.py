# SPDX-License-Identifier: Apache-2.0
"""Fetches over HTTP that reach no host but public ones: no request can make the server ask inside of its own network.

What is checked is the address that is connected to, of every redirect too. So a name that means something else the
next time it is asked for (DNS rebinding), or an address in disguise (decimal, octal, IPv4 within IPv6), gains nothing.
"""

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMValidationError


class AddressGuard:
    """Says which hosts may be connected to.

    Without a list, hosts with public addresses; with one, the hosts in it, and whatever addresses these have.
    """

    def __init__(self, allowed_hosts: Iterable[str] = ()) -> None:
        self._allowed = frozenset(host.lower() for host in allowed_hosts)

    def check(self, host: str, addresses: Sequence[str]) -> None:
        """
        Raises:
            VLLMValidationError: The host is not one to fetch media from.
        """
        if self._allowed:
            if host.lower() not in self._allowed:
                raise VLLMValidationError(f"media is not fetched from {host}: not in --allowed-media-domains")
        elif not all(is_public(address) for address in addresses):
            raise VLLMValidationError(
                f"media is not fetched from {host}, which is not a public address; "
                "a server that shall do so is started with --allowed-media-domains"
            )


def is_public(address: str) -> bool:
    """Whether an address is one of the Internet's, and so is what is wrapped in it."""
    ip = ipaddress.ip_address(address.partition("%")[0])  # Without the zone: fe80::1%eth0.
    if isinstance(ip, ipaddress.IPv6Address):
        # Relays unwrap these.
        for inner in (ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())):
            if inner is not None:
                return is_public(str(inner)) and ip.teredo is None
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


class GuardedHTTPConnection(HTTPConnection):
    """vLLM's way to fetch, through a `GuardedConnector`.

    No proxy of the environment is used: it would connect to where nobody here could look.
    """

    def __init__(self, guard: AddressGuard) -> None:
        super().__init__()
        self._guard = guard

    async def get_async_client(self) -> aiohttp.ClientSession:
        if self._async_client is None:
            self._async_client = aiohttp.ClientSession(connector=GuardedConnector(self._guard), trust_env=False)
        return self._async_client

    def get_sync_client(self) -> Any:
        raise NotImplementedError("a server fetches media on its event loop")

    async def close(self) -> None:
        """Closes what connections there are."""
        if self._async_client is not None:
            await self._async_client.close()
            self._async_client = None


class GuardedConnector(aiohttp.TCPConnector):
    """Connects to hosts that a guard lets through: for every request and every redirect."""

    def __init__(self, guard: AddressGuard) -> None:
        super().__init__(resolver=GuardedResolver(guard))
        self._guard = guard

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        host = req.url.host or ""
        # Addresses are not resolved, so the resolver would not see them. Names are none, and are checked there.
        self._guard.check(host, [host] if _is_address(host) else [])
        return await super().connect(req, traces, timeout)


class GuardedResolver(AbstractResolver):
    """Resolves names to the addresses that are connected to, and checks these."""

    def __init__(self, guard: AddressGuard) -> None:
        self._guard = guard
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        self._guard.check(host, [result["host"] for result in found])
        return found

    async def close(self) -> None:
        await self._resolver.close()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
