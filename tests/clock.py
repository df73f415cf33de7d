# SPDX-License-Identifier: Apache-2.0
"""Clocks that tests set."""

import asyncio

import pytest


async def pass_time(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the clock of the running event loop; returns when the timers that are due by then have been called."""
    loop, is_due = asyncio.get_running_loop(), asyncio.Event()
    now = loop.time() + seconds
    loop.call_at(now, is_due.set)
    monkeypatch.setattr(loop, "time", lambda: now)
    await is_due.wait()


class Clock:
    """Replaces the module `time`; starts at 1000 seconds."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now
