# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a pipeline on several machines are, as the orchestrator sees it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni.stage.spec import RayWorkers


@dataclass(frozen=True)
class Place:
    """Where a process of the pipeline belongs.

    Attributes:
        node: The machine's id; empty: the orchestrator's own.
        name: The machine in messages.
        host: Its address for the others.
        devices: The accelerators that the process has there, as `runtime.devices`; None: as configured.
        workers: Where Ray starts the workers of its engine; None: they belong to the process.
    """

    node: str
    name: str
    host: str
    devices: str | None = None
    workers: RayWorkers | None = None


class Cluster(ABC):
    """Finds machines for processes. For use from any thread.

    Attributes:
        host: The address of the orchestrator's machine for the others.
    """

    host: str

    @abstractmethod
    def place(self, instance_id: int, on_wait: Callable[[str], None]) -> Place:
        """Where a replica's process belongs now; waits as long as there is no machine for it.

        Args:
            on_wait: Called with what is waited for, if that takes long.

        Raises:
            EOFError: The cluster is closed or lost.
        """

    @abstractmethod
    def start_server(self, node: str, spec: bytes, timeout: float) -> None:
        """Starts a `NodeServer` on a machine.

        Raises:
            EOFError, TimeoutError: It could not be started.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives the machines back."""
