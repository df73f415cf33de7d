# SPDX-License-Identifier: Apache-2.0
"""Stages that run a diffusers pipeline, or a part of one."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_omni.config.dit_config import DIT_PARALLEL_SIZES, DIT_SETTINGS, DiTConfig, parse_dit_config
from vllm_omni.config.resources import parse_memory
from vllm_omni.config.stage import OmniStageConfig, StageKind
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.control import WEIGHT_VERBS, AddLoRA, ResetEncoderCache, Sleep, WakeUp
from vllm_omni.errors import StageConfigError

if TYPE_CHECKING:
    from vllm_omni.diffusion.input_processor import DiffusionInputProcessor
    from vllm_omni.diffusion.pipeline_info import PipelineInfo
    from vllm_omni.placement.memory_needs import StageNeeds
    from vllm_omni.stage.engines.base import Outbox
    from vllm_omni.stage.engines.diffusion import DiffusionStageEngine
    from vllm_omni.stage.spec import RayWorkers


class Diffusion(StageKind):
    """`DiT`: runs a diffusers pipeline."""

    streams_output = False
    reads_media = True
    params = "diffusion"
    takes_settings = True
    parallel_sizes = DIT_PARALLEL_SIZES
    leaves_no_room = True
    reads_weights = True
    verbs = StageKind.verbs | WEIGHT_VERBS | {AddLoRA, ResetEncoderCache, Sleep, WakeUp}
    checkpoint_is = "a diffusers pipeline"
    checkpoint_file = "model_index.json"

    @classmethod
    def of(cls, name: str, stage: OmniStageConfig) -> StageKind:
        return (PromptEncoder if stage.engine_args.get("part") == "encoder" else cls)(name, stage)

    @cached_property
    def settings(self) -> DiTConfig:
        return parse_dit_config(self.stage.dit_engine_args, self.stage.label)

    def check(self) -> None:
        self.check_output_type()

    def sleep_problem(self, level: int, keeps_requests: bool) -> str | None:
        from vllm.platforms import current_platform

        if self.settings.world_size > 1 or self.settings.offload:
            return "its weights are offloaded, or on several devices; use level 0"
        if level == 1 and current_platform.is_cpu():
            return "its weights are on the host already; use level 2, which loads them again, or level 0"
        return "the requests that are kept need it; use the mode abort or wait" if keeps_requests else None

    def needs_input_processor(self, sources: Sequence[OmniStageConfig]) -> bool:
        return bool(sources) and not any(isinstance(source.kind, PromptEncoder) for source in sources)

    def takes_adapter(self, stages: Sequence[OmniStageConfig]) -> bool:
        first = [stage for stage in stages if not stage.engine_input_source]
        if any(isinstance(stage.kind, PromptEncoder) for stage in first):
            return self.stage.engine_args.get("part") == "denoiser"
        return not self.stage.engine_input_source

    def known_arguments(self) -> set[str]:
        return set(DIT_SETTINGS)

    def computed_arguments(self, model: str) -> Iterator[tuple[str, Any, str]]:
        info = self.load_pipeline_info(model)
        for name in DIT_SETTINGS:
            value = getattr(self.settings, name)
            if name == "pipeline_class":
                yield name, info.pipeline_class.__name__, "checkpoint: model_index.json"
            elif value is not None and value != {}:
                yield name, value, "default"

    def memory_needs(self, config: PipelineConfig, model: str) -> "StageNeeds":
        from vllm_omni.placement.memory_needs import diffusers_needs

        return diffusers_needs(self.settings, self.stage.checkpoint(model))

    def modules_to_preload(self, model: str) -> set[str]:
        """The engine, and the module of the pipeline, unless that is code that comes with the checkpoint."""
        module = self.load_pipeline_info(model).pipeline_class.__module__
        return {"vllm_omni.stage.engines.diffusion"} | ({module} if module.startswith("diffusers.") else set())

    def make_diffusion_processor(self, model: str) -> "DiffusionInputProcessor":
        from vllm_omni.diffusion.input_processor import DiffusionInputProcessor  # imports diffusers

        return DiffusionInputProcessor(self.stage, self.stage.checkpoint(model))

    def load_pipeline_info(self, model: str) -> "PipelineInfo":
        from vllm_omni.diffusion.modular_info import read_pipeline_info  # imports diffusers

        return read_pipeline_info(self.stage.checkpoint(model), self.settings)

    def make_engine(
        self, model: str, outbox: "Outbox", workers: "RayWorkers | None" = None, log_stats: bool = False
    ) -> "DiffusionStageEngine":
        from vllm_omni.stage.engines.diffusion import DiffusionStageEngine

        memory = self.stage.runtime.memory
        budget = None if memory is None else parse_memory(memory)
        return DiffusionStageEngine(outbox, self.stage.stage_id, model, self.settings, budget)


class PromptEncoder(Diffusion):
    """`DiT` with `part: encoder`: encodes prompts for another diffusion stage."""

    takes_settings = False

    def params_from(self, readers: Sequence[OmniStageConfig]) -> int:
        reader = next((stage for stage in readers if isinstance(stage.kind, Diffusion)), None)
        if reader is None:
            raise StageConfigError(f"{self.stage.label}: part: encoder, but no diffusion stage reads it")
        if self.stage.default_sampling_params != reader.default_sampling_params:
            raise StageConfigError(
                f"{self.stage.label}: default_sampling_params must be those of stage {reader.stage_id}, its reader"
            )
        return reader.stage_id
