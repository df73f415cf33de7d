# SPDX-License-Identifier: Apache-2.0
"""Bounds the memory that a server holds of finished requests. Knows no endpoint, and not what is in a body."""

import ctypes
import gc
import os

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.openai.limits import MIB

COLLECT_AFTER_BYTES = 64 * MIB

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_TUNABLES = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def return_large_blocks() -> None:
    """Makes glibc return freed blocks of 1 MiB or more to the system at once, in this process. For a program's start.

    By default glibc raises this size as blocks are freed, up to 32 MiB. Media are decoded in several threads, each with
    a heap of its own, and each heap then keeps the most that it has ever held. Does nothing with another C library, or
    where the environment has settings for malloc.
    """
    if not any(name in os.environ for name in _TUNABLES):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, MIB)


class GarbageMiddleware:
    """Runs Python's garbage collector each time that requests with `COLLECT_AFTER_BYTES` of bodies have been received.

    vLLM and pydantic build reference cycles of a chat request, which hold its media as they were sent. Only the
    collector frees them, and Python starts a full run by the number of new objects: after about a thousand requests,
    however large they are. A run takes a few milliseconds, since vLLM has frozen (`gc.freeze`) what the server loaded.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted() -> Message:
            message = await receive()
            self._num_bytes += len(message.get("body", b""))
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            if self._num_bytes >= COLLECT_AFTER_BYTES:
                self._num_bytes = 0
                gc.collect()
