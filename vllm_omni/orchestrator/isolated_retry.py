# SPDX-License-Identifier: Apache-2.0
"""The requests that a process held when it died. Any of them may be the cause, so each is tried once more, alone.

Belongs to the orchestrator's thread.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from vllm_omni.orchestrator.request import RequestRecord

LIMIT_S = 60.0
"""How long a process that works again may be kept for this; new requests wait meanwhile."""


@dataclass(slots=True)
class IsolatedRetry:
    """Retries in one process, one request after the other.

    Attributes:
        instance_id, stage_id: The replica and the stage that run in it.
        waiting: Requests to be tried, in order.
        running: The request that is tried; nothing else is in the process.
        ends: When it ends, whatever waits (`time.monotonic()`); infinite while the process is not ready.
    """

    instance_id: int
    stage_id: int
    waiting: deque[RequestRecord] = field(default_factory=deque)
    running: RequestRecord | None = None
    ends: float = math.inf

    def concerns(self, record: RequestRecord) -> bool:
        """Whether the process has work for a request, or will get some."""
        return record.instances.get(self.stage_id) == self.instance_id and self.stage_id in record.pending
