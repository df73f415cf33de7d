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
class Quarantine:
    """The quarantine of one process.

    Attributes:
        instances: The process's instance of each of its stages, by stage id.
        waiting: Requests to be tried, in order.
        running: The request that is tried; nothing else is in the process.
        ends: When it ends, whatever waits (`time.monotonic()`); infinite while the process is not ready.
    """

    instances: dict[int, int]
    waiting: deque[RequestRecord] = field(default_factory=deque)
    running: RequestRecord | None = None
    ends: float = math.inf

    def concerns(self, record: RequestRecord) -> bool:
        """Whether the process has work for a request, or will get some."""
        return any(
            record.instances.get(stage_id) == instance_id and stage_id in record.pending
            for stage_id, instance_id in self.instances.items()
        )
