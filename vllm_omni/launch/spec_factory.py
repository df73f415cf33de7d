# SPDX-License-Identifier: Apache-2.0
"""Makes the start parameters of each stage process from the pipeline's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from vllm_omni.config.loader import input_processor_class
from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, PipelineConfig, WindowConfig
from vllm_omni.control import DEFAULT_WEIGHT_VERSION
from vllm_omni.distributed.messages import ORCHESTRATOR, PeerUpMessage
from vllm_omni.distributed.network import NetworkSpec
from vllm_omni.launch.stage_handle import StageHandle
from vllm_omni.placement.spec import MachineShare, StagePlacement
from vllm_omni.stage.spec import RayWorkers, SourceSpec, StageSpec, TargetSpec


@dataclass(frozen=True)
class Site:
    """A machine that stages run on.

    Attributes:
        run_dir: The pipeline's run directory there.
        orchestrator: The orchestrator's address for its stages.
        is_local: It is the orchestrator's machine.
        placements: The cores of its replicas, by instance id; those of others are left to the system.
        network: For stages on other machines; None: there are none.
        devices: The replicas on it with their devices, by instance id, if its stages compute their own shares of it.
        workers: Where Ray starts the workers of the process that is started; None: they belong to it.
    """

    run_dir: Path
    orchestrator: str
    is_local: bool = True
    placements: Mapping[int, StagePlacement] = field(default_factory=dict)
    network: NetworkSpec | None = None
    devices: Mapping[int, str | None] | None = None
    workers: RayWorkers | None = None


@dataclass(frozen=True)
class StageWeights:
    """The weights that all replicas of a stage have to have.

    Attributes:
        path: Where they are; None: in the stage's checkpoint.
    """

    version: str = DEFAULT_WEIGHT_VERSION
    path: str | None = None


@dataclass(frozen=True)
class SpecFactory:
    """Makes the `StageSpec` of a stage's next process.

    Attributes:
        weights: By stage id; of the others they are those of the checkpoint. Changed by the orchestrator.
    """

    config: PipelineConfig
    model: str
    connector: ConnectorConfig
    otlp_traces_endpoint: str | None
    log_stats: bool = False
    weights: dict[int, StageWeights] = field(default_factory=dict)

    def encode(self, stage: StageHandle, site: Site) -> bytes:
        """The argument of `vllm_omni.stage.worker.main`."""
        return msgspec.json.encode(self.make(stage, site))

    def make(self, stage: StageHandle, site: Site) -> StageSpec:
        config, runtime, replicas = stage.config, self.config.runtime, self.config.replicas
        weights = self.weights.get(stage.stage_id, StageWeights())
        return StageSpec(
            instance=stage.instance,
            model=config.checkpoint(self.model),
            epoch=stage.epoch,
            run_dir=str(site.run_dir),
            orchestrator=PeerUpMessage(
                instance_id=ORCHESTRATOR, epoch=0, address=site.orchestrator, is_local=site.is_local
            ),
            sources={
                instance.instance_id: SourceSpec(stage_id=source, window=self._window(source, config))
                for source in config.engine_input_source
                for instance in replicas[source]
            },
            targets={
                instance.instance_id: self._make_target(config, instance.stage)
                for target in self.config.targets[config.stage_id]
                for instance in replicas[target]
            },
            segments=runtime.ar if config.kind.is_autoregressive else None,
            max_inflight=self.config.max_inflight(config),
            max_queued=self.config.max_queued(config),
            high_watermark_bytes=runtime.defaults.high_watermark_bytes,
            connector=self.connector,
            placement=site.placements.get(stage.instance_id, StagePlacement()),
            share=None if site.devices is None else self._make_share(site.devices),
            network=site.network,
            workers=site.workers,
            otlp_traces_endpoint=self.otlp_traces_endpoint,
            log_stats=self.log_stats,
            weight_version=weights.version,
            weights_path=weights.path,
        )

    def _make_share(self, devices: Mapping[int, str | None]) -> MachineShare:
        checkpoints = {stage.checkpoint(self.model) for stage in self.config.stage_args} - {""}
        return MachineShare(
            pipeline=self.config,
            devices=dict(devices),
            paths=sorted(checkpoint for checkpoint in checkpoints if Path(checkpoint).exists()),
        )

    def _make_target(self, stage: OmniStageConfig, target: OmniStageConfig) -> TargetSpec:
        return TargetSpec(
            window=self._window(stage.stage_id, target),
            reads=self._reads(target),
            max_queued=self.config.max_queued(target),
            high_watermark_bytes=self.config.runtime.defaults.high_watermark_bytes,
            connector=self.config.connector(stage, target.stage_id, self.connector.shm_threshold_bytes),
        )

    def _window(self, source: int, target: OmniStageConfig) -> WindowConfig:
        processor = input_processor_class(target)
        return self.config.window(source, target.stage_id, processor.window if processor else None)

    def _reads(self, stage: OmniStageConfig) -> list[str] | None:
        if stage.reads is not None:
            return stage.reads
        processor = input_processor_class(stage)
        return list(processor.reads) if processor is not None and processor.reads is not None else None
