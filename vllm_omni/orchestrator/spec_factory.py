# SPDX-License-Identifier: Apache-2.0
"""Makes the start parameters of each stage process from the pipeline's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni.config.loader import resolve_dotted_path
from vllm_omni.config.stage_config import ConnectorConfig, OmniStageConfig, PipelineConfig, WindowConfig
from vllm_omni.distributed.run_dir import RunDir, orchestrator_address
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.orchestrator.omni_stage import OmniStage
from vllm_omni.stage.spec import StagePlacement, StageSpec, TargetSpec


@dataclass(frozen=True)
class SpecFactory:
    """Makes the `StageSpec` of a stage's next process."""

    config: PipelineConfig
    model: str
    connector: ConnectorConfig
    placements: Mapping[int, StagePlacement]
    otlp_traces_endpoint: str | None

    def make(self, stage: OmniStage, run_dir: RunDir) -> StageSpec:
        config, runtime = stage.config, self.config.runtime
        return StageSpec(
            stage=config,
            model=config.checkpoint(self.model),
            epoch=stage.epoch,
            run_dir=str(run_dir.path),
            orchestrator=orchestrator_address(run_dir.path),
            sources={source: self._window(source, config) for source in config.engine_input_source},
            targets={
                target: self._make_target(config, self.config.stages[target])
                for target in self.config.targets[config.stage_id]
            },
            segments=runtime.ar if config.kind == "AR" else None,
            max_inflight=self.config.max_inflight(config),
            max_queued=self.config.max_queued(config),
            high_watermark_bytes=runtime.defaults.high_watermark_bytes,
            connector=self.connector,
            placement=self.placements.get(config.stage_id, StagePlacement()),
            otlp_traces_endpoint=self.otlp_traces_endpoint,
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
        processor = _input_processor_class(target)
        return self.config.window(source, target.stage_id, processor.window if processor else None)

    def _reads(self, stage: OmniStageConfig) -> list[str] | None:
        if stage.reads is not None:
            return stage.reads
        processor = _input_processor_class(stage)
        return list(processor.reads) if processor is not None and processor.reads is not None else None


def _input_processor_class(stage: OmniStageConfig) -> type[StageInputProcessor] | None:
    path = stage.custom_process_input_func
    return None if path is None else resolve_dotted_path(path, "custom_process_input_func")
