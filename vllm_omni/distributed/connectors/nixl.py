# SPDX-License-Identifier: Apache-2.0
"""Memory of processes on other machines, read with NIXL: over RDMA where there is some, otherwise over TCP.

NIXL moves bytes and nothing else: what there is to read, and that it has been read, is told by `network`. It neither
encrypts nor authenticates. A read that has begun is never cancelled: UCX goes on writing to its memory after NIXL has
released it. https://github.com/ai-dynamo/nixl
"""

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)

_TCP = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "1m"}
"""With the segments of UCX's defaults, it is three times slower over TCP."""
_POLL_S = 0.0005


@dataclass(slots=True)
class _Read:
    """A transfer in progress, and the memory that it writes to."""

    handle: Any
    registration: Any
    buffers: Sequence[memoryview]


class NixlAgent:
    """The NIXL agent of a process. Methods belong to one thread; another one waits for the ends of reads."""

    def __init__(self) -> None:
        for name, value in _TCP.items():
            os.environ.setdefault(name, value)
        from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

        self._agent = NixlWrapper(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"]))
        self._lock = threading.Lock()  # of all that is below, and of the agent
        self._reads: dict[bytes, _Read] = {}
        self._ended: deque[tuple[bytes, bool]] = deque()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK)
        self._has_reads = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="nixl", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when `take_ended` has something."""
        return self._wakes

    def register(self, buffers: Iterable[memoryview]) -> Any:
        """Lets other processes read memory, which must not change or be freed until `deregister`."""
        with self._lock:
            return self._agent.register_memory(_regions(buffers), "DRAM")

    def describe(self, registration: Any) -> tuple[bytes, bytes]:
        """What `read` needs."""
        with self._lock:
            agent = self._agent.get_partial_agent_metadata(registration, inc_conn_info=True, backends=["UCX"])
            return agent, self._agent.get_serialized_descs(registration.trim())

    def deregister(self, registration: Any) -> None:
        with self._lock:
            self._agent.deregister_memory(registration)

    def read(self, key: bytes, description: tuple[bytes, bytes], buffers: Sequence[memoryview]) -> None:
        """Starts to fill buffers, as many and as large as those that were registered."""
        agent, regions = description
        with self._lock:
            registration = self._agent.register_memory(_regions(buffers), "DRAM")
            try:
                name = self._agent.add_remote_agent(agent)
                remote = self._agent.deserialize_descs(regions)
                handle = self._agent.initialize_xfer("READ", registration.trim(), remote, name)
                self._agent.transfer(handle)
            except Exception as error:  # NIXL's own types, without a common base.
                _warn(buffers, error)
                self._agent.deregister_memory(registration)
                self._end(key, is_read=False)
                return
            self._reads[key] = _Read(handle, registration, buffers)
        self._has_reads.set()

    def take_ended(self) -> Iterator[tuple[bytes, bool]]:
        """Keys of reads that have ended, and whether all has arrived."""
        with self._lock:
            if self._ended:
                os.eventfd_read(self._wakes)
            ended, self._ended = self._ended, deque()
        yield from ended

    def close(self) -> None:
        self._is_closed = True
        self._has_reads.set()
        self._thread.join()
        os.close(self._wakes)

    def _watch(self) -> None:
        """NIXL has nothing that could be waited for: asks again and again, as long as there is a read."""
        while not self._is_closed:
            self._has_reads.wait()
            with self._lock:
                self._reads = {key: read for key, read in self._reads.items() if not self._has_ended(key, read)}
                if not self._reads and not self._is_closed:
                    self._has_reads.clear()
            time.sleep(_POLL_S)

    def _has_ended(self, key: bytes, read: _Read) -> bool:
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception as error:  # As above; the sender's process has died, for instance.
            _warn(read.buffers, error)
            state = "ERR"
        if state == "PROC":
            return False
        self._agent.release_xfer_handle(read.handle)
        self._agent.deregister_memory(read.registration)
        self._end(key, is_read=state == "DONE")
        return True

    def _end(self, key: bytes, is_read: bool) -> None:
        self._ended.append((key, is_read))
        os.eventfd_write(self._wakes, 1)


def _regions(buffers: Iterable[memoryview]) -> list[tuple[int, int, int, str]]:
    """Address, size, device and a name; empty buffers have none."""
    return [(np.frombuffer(part, np.uint8).ctypes.data, part.nbytes, 0, "") for part in buffers if part.nbytes]


def _warn(buffers: Sequence[memoryview], error: Exception) -> None:
    size = sum(buffer.nbytes for buffer in buffers)
    logger.warning("a payload of %d bytes cannot be read with NIXL: %s", size, error)
