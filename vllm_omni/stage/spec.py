# SPDX-License-Identifier: Apache-2.0
"""The parameters of a stage process."""

import msgspec

from vllm_omni.config.stage_config import OmniStageConfig, SegmentConfig, WindowConfig


class StagePlacement(msgspec.Struct, kw_only=True, frozen=True):
    """The cores of a stage's process.

    Attributes:
        cpus: Cores that it is bound to; None: not bound.
        num_threads: Threads for tensor operations; None leaves it to the libraries.
    """

    cpus: list[int] | None = None
    num_threads: int | None = None


class SourceSpec(msgspec.Struct, kw_only=True):
    """A stage whose output this one reads.

    Attributes:
        epoch: Counts its processes; part of its address. None while it has none that serves: word of that will come.
        window: How its output is cut into windows.
    """

    epoch: int | None
    window: WindowConfig


class TargetSpec(msgspec.Struct, kw_only=True):
    """A stage that reads this one's output.

    Attributes:
        epoch: As in `SourceSpec`.
        window: How it cuts the output into windows; it gets segments of it, while it is made, if it does.
        reads: What of the output it reads (see `StageInputProcessor.reads`).
        max_queued, high_watermark_bytes: What may wait in it for its engine.
        shm_threshold_bytes: From this size on, payloads to it go through shared memory.
    """

    epoch: int | None
    window: WindowConfig
    reads: list[str] | None
    max_queued: int
    high_watermark_bytes: int
    shm_threshold_bytes: int


class StageSpec(msgspec.Struct, kw_only=True):
    """What one stage is and where its peers are. Crosses to the child as JSON.

    Attributes:
        stage: Its configuration, overrides applied.
        model: The stage's checkpoint.
        epoch: Counts the processes that the stage has had, from 0.
        run_dir: The pipeline's directory of sockets and payloads.
        sources, targets: Its neighbours, by stage id.
        segments: When output is sent to a streaming caller; None: as soon as it is available.
        max_inflight: Requests that its engine holds at once; None: the engine's capacity.
        max_queued, high_watermark_bytes: Limit of requests and bytes that wait for its engine; feeders wait beyond it.
        shm_threshold_bytes: From this size on, payloads to the orchestrator go through shared memory.
        placement: Its cores and threads.
        otlp_traces_endpoint: Where its spans go; None: no spans.
    """

    stage: OmniStageConfig
    model: str = ""
    epoch: int = 0
    run_dir: str
    sources: dict[int, SourceSpec] = {}
    targets: dict[int, TargetSpec] = {}
    segments: SegmentConfig | None = None
    max_inflight: int | None = None
    max_queued: int = 64
    high_watermark_bytes: int = 256 << 20
    shm_threshold_bytes: int = 65536
    placement: StagePlacement = StagePlacement()
    otlp_traces_endpoint: str | None = None
