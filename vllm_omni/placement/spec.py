# SPDX-License-Identifier: Apache-2.0
"""Where a replica runs on its machine, and what that follows from where another process decides it."""

import msgspec

from vllm_omni.config.stage_config import PipelineConfig


class StagePlacement(msgspec.Struct, kw_only=True, frozen=True):
    """The cores of a stage's process.

    Attributes:
        cpus: Cores that it is bound to; None: none in particular.
        num_threads: Threads for tensor operations; None leaves it to the libraries.
        max_threads: While other stages of the machine wait; None if `num_threads` is.
    """

    cpus: list[int] | None = None
    num_threads: int | None = None
    max_threads: int | None = None

    @property
    def threads(self) -> int | str | None:
        """Their number, for people."""
        if self.max_threads is None or self.max_threads == self.num_threads:
            return self.num_threads
        return f"{self.num_threads} to {self.max_threads}"


class MachineShare(msgspec.Struct, kw_only=True, frozen=True):
    """What is on a machine, so that a stage can compute its own share of memory, devices and cores.

    Attributes:
        pipeline: All stages.
        devices: The replicas on this machine by instance id, with their `runtime.devices`; None: as configured.
        paths: Checkpoints that are paths, on every machine.
    """

    pipeline: PipelineConfig
    devices: dict[int, str | None]
    paths: list[str]
