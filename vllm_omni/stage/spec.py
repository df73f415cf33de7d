# SPDX-License-Identifier: Apache-2.0
"""All that a stage process is told when it starts."""

import msgspec

from vllm_omni.config.stage_config import OmniStageConfig


class StageSpec(msgspec.Struct, kw_only=True):
    """What one stage is and where its peers are. Crosses to the child as JSON.

    Attributes:
        stage: Its configuration, overrides applied.
        model: The checkpoint.
        targets: For each stage that may read this stage's output, the size in bytes from which on payloads to it
            go through shared memory.
        shm_threshold_bytes: The same for what goes to the orchestrator.
        run_dir: The pipeline's directory of sockets and payloads.
        num_threads: Threads for tensor operations; None leaves it to the libraries.
    """

    stage: OmniStageConfig
    model: str
    targets: dict[int, int]
    shm_threshold_bytes: int
    run_dir: str
    num_threads: int | None = None
