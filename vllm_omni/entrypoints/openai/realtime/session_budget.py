# SPDX-License-Identifier: Apache-2.0
"""The memory that realtime sessions and unread answers may take: those of one client, and all.

It counts what sessions hold between their events: items with their sounds and images, until the last response that
reads them has ended; sound that is not committed; events that arrive or are handled; and, over HTTP too, what an answer
has of text and speech that its client has not read. Knows none of these.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from vllm_omni.entrypoints.openai.server_args import RealtimeLimits, flag
from vllm_omni.errors import PipelineFullError

_RETRY_S = 10.0
_COLLECT_EVERY_S = 10.0
"""At most: to look for cycles takes the event loop a part of a second, and a client may be refused often."""


Share = Callable[..., "SessionShare"]
"""`SessionBudget.share` for one client: a share of its budget, of a holder if one is given."""


class SessionBudget:
    """The budget of one server. For its event loop; what is counted may be freed on any thread.

    Attributes:
        make_room: Frees something that is kept in case somebody asks for it: of a client, or (None) of all. Returns
            whether there was anything.
    """

    def __init__(self, limits: RealtimeLimits) -> None:
        self._max_bytes = limits.max_total_realtime_bytes
        self._max_client_bytes = limits.max_client_realtime_bytes or -(-self._max_bytes // 2)
        self._num_bytes: Counter[bytes | str] = Counter()
        self._total = 0
        self._freed: deque[SessionShare] = deque()
        self._collected = -_COLLECT_EVERY_S
        self.make_room: Callable[[bytes | str | None], bool] = lambda client: False

    @property
    def num_bytes(self) -> int:
        """What all of them hold."""
        self._take_back_freed()
        return self._total

    def share(self, client: bytes | str, holder: Any = None) -> SessionShare:
        """A share of nothing yet.

        Args:
            client: See `RequestContext`.
            holder: It takes nothing any more once this object is freed.
        """
        share = SessionShare(self, client)
        if holder is not None:
            weakref.finalize(holder, self._freed.append, share).atexit = False
        return share

    def add(self, client: bytes | str, num_bytes: int) -> None:
        """
        Raises:
            PipelineFullError: There is no room for so many bytes more.
        """
        self._take_back_freed()
        if num_bytes > 0 and self._refusal(client, num_bytes):
            self._collect()
            while refusal := self._refusal(client, num_bytes):
                is_clients = self._num_bytes[client] + num_bytes > self._max_client_bytes
                if not self.make_room(client if is_clients else None):
                    raise PipelineFullError(f"{refusal}; delete items, or try again later", _RETRY_S)
        self._total += num_bytes
        self._num_bytes[client] += num_bytes
        if not self._num_bytes[client]:
            del self._num_bytes[client]

    def _collect(self) -> None:
        """Frees items in a cycle, such as that of an error."""
        if (now := time.monotonic()) - self._collected >= _COLLECT_EVERY_S:
            self._collected = now
            gc.collect()
            self._take_back_freed()

    def _refusal(self, client: bytes | str, num_bytes: int) -> str | None:
        if self._num_bytes[client] + num_bytes > self._max_client_bytes:
            limit = f"{self._max_client_bytes} bytes ({flag('max_client_realtime_bytes')})"
            return f"the realtime sessions and unread answers of this key, or address, would hold more than {limit}"
        if self._total + num_bytes > self._max_bytes:
            limit = f"{self._max_bytes} bytes ({flag('max_total_realtime_bytes')})"
            return f"all realtime sessions and unread answers would hold more than {limit}"
        return None

    def _take_back_freed(self) -> None:
        while self._freed:
            self._freed.popleft().release()


class SessionShare:
    """What one thing takes of a budget.

    Attributes:
        num_bytes: Of it.
    """

    def __init__(self, budget: SessionBudget, client: bytes | str) -> None:
        self._budget, self._client = budget, client
        self.num_bytes = 0

    def set(self, num_bytes: int) -> None:
        """Has it be of a size.

        Raises:
            PipelineFullError: It would be larger, and there is no room; it is as before.
        """
        self._budget.add(self._client, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def release(self) -> None:
        self.set(0)
