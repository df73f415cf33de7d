# SPDX-License-Identifier: Apache-2.0
"""A visitor's last request, in any tab: the tab "Stages" shows its way through the stages."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class LastRequest:
    """One visitor's.

    Attributes:
        id: In the server; empty before the first one.
        started: When it was sent, in `time.monotonic()` seconds.
        is_running: Whether it has not ended.
    """

    id: str = ""
    started: float = 0.0
    is_running: bool = False

    @contextmanager
    def sending(self, prefix: str) -> Iterator[dict[str, str]]:
        """Yields the headers of a request that ends with the block; `prefix` is what the server adds to its id."""
        name = uuid.uuid4().hex
        with self.running(f"{prefix}-{name}"):
            yield {"X-Request-Id": name}

    @contextmanager
    def running(self, request_id: str) -> Iterator[None]:
        """A request that ends with the block, unless another one has taken its place."""
        self.id, self.started, self.is_running = request_id, time.monotonic(), True
        try:
            yield
        finally:
            if self.id == request_id:
                self.is_running = False
