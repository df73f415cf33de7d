# SPDX-License-Identifier: Apache-2.0
"""The start parameters of a stage process."""

import msgspec

from vllm_omni.config.stage_config import (
    ConnectorConfig,
    OmniStageConfig,
    SegmentConfig,
    StageInstance,
    WindowConfig,
)
from vllm_omni.control import DEFAULT_WEIGHT_VERSION
from vllm_omni.distributed.messages import PeerUpMessage
from vllm_omni.distributed.network import NetworkSpec
from vllm_omni.placement.spec import MachineShare, StagePlacement


class RayWorkers(msgspec.Struct, kw_only=True, frozen=True):
    """Where vLLM's Ray executor starts the workers of an engine: in a placement group with a bundle for each.

    Attributes:
        address: Of the cluster.
        namespace: Of the pipeline's job.
        group: The placement group's name.
    """

    address: str
    namespace: str
    group: str


class SourceSpec(msgspec.Struct, kw_only=True):
    """A replica of a stage whose output this one reads.

    Attributes:
        window: How this stage cuts the output into windows.
    """

    stage_id: int
    window: WindowConfig


class TargetSpec(msgspec.Struct, kw_only=True):
    """A replica of a stage that reads this one's output.

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
    """One replica of a stage and its neighbours. Passed to the child process as JSON.

    Attributes:
        instance: The replica, with its stage's configuration, overrides applied.
        model: The stage's checkpoint.
        epoch: Counts the processes of the replica, from 0.
        run_dir: The pipeline's directory of sockets and payloads.
        orchestrator: Where the orchestrator is.
        sources: The replicas of its sources, by instance id.
        targets: The replicas of the stages that read its output, by instance id.
        segments: When output is sent to a streaming client; None: as soon as it is made.
        max_inflight: Requests that its engine holds at once; None: the engine's capacity.
        max_queued, high_watermark_bytes: Requests and bytes that may wait in it for its engine before its sources wait.
        connector: How payloads travel to the orchestrator.
        placement: Its cores and threads.
        share: Its machine, from which cores, threads, budget and devices follow; None: they are as they are here.
        otlp_traces_endpoint: Where its spans go; None: no spans.
        log_stats: Whether it sends its engine's metrics.
        network: For neighbours on other machines; None: there are none.
        workers: Where Ray starts the workers of its engine; None: they belong to its process.
        weight_version: Of the weights that it has to have.
        weights_path: Where they are; None: in its checkpoint.
    """

    instance: StageInstance
    model: str = ""
    epoch: int = 0
    run_dir: str
    orchestrator: PeerUpMessage
    sources: dict[int, SourceSpec] = {}
    targets: dict[int, TargetSpec] = {}
    segments: SegmentConfig | None = None
    max_inflight: int | None = None
    max_queued: int = 64
    high_watermark_bytes: int = 256 << 20
    connector: ConnectorConfig
    placement: StagePlacement = StagePlacement()
    share: MachineShare | None = None
    otlp_traces_endpoint: str | None = None
    log_stats: bool = False
    network: NetworkSpec | None = None
    workers: RayWorkers | None = None
    weight_version: str = DEFAULT_WEIGHT_VERSION
    weights_path: str | None = None

    @property
    def stage(self) -> OmniStageConfig:
        return self.instance.stage
