# SPDX-License-Identifier: Apache-2.0
"""The start parameters of a stage process."""

import msgspec

from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, SegmentConfig, WindowConfig


class StagePlacement(msgspec.Struct, kw_only=True, frozen=True):
    """The cores of a stage's process.

    Attributes:
        cpus: Cores that it is bound to; None: none in particular.
        num_threads: Threads for tensor operations; None leaves it to the libraries.
    """

    cpus: list[int] | None = None
    num_threads: int | None = None


class TargetSpec(msgspec.Struct, kw_only=True):
    """A stage that reads this one's output.

    Attributes:
        window: How it cuts the output into windows; if it does, it gets segments while the output is made.
        reads: The fields of the output that it reads (see `StageInputProcessor.reads`).
        max_queued, high_watermark_bytes: What may wait in it for its engine.
        connector: How payloads travel to it.
    """

    window: WindowConfig
    reads: list[str] | None
    max_queued: int
    high_watermark_bytes: int
    connector: ConnectorConfig


class StageSpec(msgspec.Struct, kw_only=True):
    """One stage and its neighbours. Passed to the child process as JSON.

    Attributes:
        stage: Its configuration, overrides applied.
        model: The stage's checkpoint.
        epoch: Counts the processes of the stage, from 0.
        run_dir: The pipeline's directory of sockets and payloads.
        orchestrator: The address of the orchestrator.
        sources: How the output of each of its sources is cut into windows, by stage id.
        targets: The stages that read its output, by stage id.
        segments: When output is sent to a streaming client; None: as soon as it is made.
        max_inflight: Requests that its engine holds at once; None: the engine's capacity.
        max_queued, high_watermark_bytes: Requests and bytes that may wait in it for its engine before its feeders wait.
        connector: How payloads travel to the orchestrator.
        placement: Its cores and threads.
        otlp_traces_endpoint: Where its spans go; None: no spans.
    """

    stage: OmniStageConfig
    model: str = ""
    epoch: int = 0
    run_dir: str
    orchestrator: str
    sources: dict[int, WindowConfig] = {}
    targets: dict[int, TargetSpec] = {}
    segments: SegmentConfig | None = None
    max_inflight: int | None = None
    max_queued: int = 64
    high_watermark_bytes: int = 256 << 20
    connector: ConnectorConfig
    placement: StagePlacement = StagePlacement()
    otlp_traces_endpoint: str | None = None
