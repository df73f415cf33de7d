# SPDX-License-Identifier: Apache-2.0
"""Stages that run a vLLM engine: autoregressive, one-step generation, and transcription."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from vllm_omni.config.stage import OmniStageConfig, StageKind
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.control import (
    WEIGHT_VERBS,
    AddLoRA,
    CollectiveRPC,
    ResetEncoderCache,
    ResetMMCache,
    ResetPrefixCache,
    Sleep,
    WakeUp,
)
from vllm_omni.errors import StageConfigError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.interfaces import SupportsTranscription

    from vllm_omni.engine.engine_args import EngineType
    from vllm_omni.engine.input_processor import OmniInputProcessor
    from vllm_omni.kinds.parameters import FunctionParameters
    from vllm_omni.placement.memory_needs import StageNeeds
    from vllm_omni.stage.engines.base import Outbox
    from vllm_omni.stage.engines.llm import LLMStageEngine
    from vllm_omni.stage.spec import RayWorkers


class _VllmStage(StageKind):
    """What all of them have in common."""

    engine_type: "ClassVar[EngineType]"
    transcribes = False
    params = "sampling"
    parallel_sizes = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
    budget_argument = "gpu_memory_utilization"
    quantization = "fp8"
    reads_weights = True
    spins = True
    verbs = StageKind.verbs | WEIGHT_VERBS | {
        AddLoRA, CollectiveRPC, ResetEncoderCache, ResetMMCache, ResetPrefixCache, Sleep, WakeUp,
    }  # fmt: skip

    @property
    def reads_prompts(self) -> bool:
        return not self.stage.engine_input_source

    @property
    def schedules_by_priority(self) -> bool:
        return self.stage.engine_args.get("scheduling_policy") == "priority"

    @property
    def has_ray_workers(self) -> bool:
        return self.stage.engine_args.get("distributed_executor_backend") == "ray"

    def check(self) -> None:
        self.check_output_type()

    def sleep_problem(self, level: int, keeps_requests: bool) -> str | None:
        if not self.stage.engine_args.get("enable_sleep_mode"):
            return "set enable_sleep_mode: true, which needs a GPU, or use level 0"
        return "vLLM would not load its weights again; use level 1" if level == 2 else None

    def needs_input_processor(self, sources: Sequence[OmniStageConfig]) -> bool:
        return bool(sources)

    def known_arguments(self) -> set[str]:
        from vllm_omni.engine.stage_args import OWN_ARGUMENTS, VLLM_ARGUMENTS

        return VLLM_ARGUMENTS | OWN_ARGUMENTS

    def check_arguments(self, model: str) -> "EngineArgs":
        from vllm_omni.engine.stage_args import check_engine_args

        return check_engine_args(self.stage, model, self.engine_type)

    def longest_length(self, model: str) -> int | None:
        from vllm_omni.engine.stage_args import longest_length

        return longest_length(self.stage, model, self.engine_type)

    def computed_arguments(self, model: str) -> Iterator[tuple[str, Any, str]]:
        from vllm_omni.engine.stage_args import computed_arguments

        return computed_arguments(self.stage, model, self.engine_type)

    def memory_needs(self, config: PipelineConfig, model: str) -> "StageNeeds":
        from vllm_omni.placement.memory_needs import vllm_needs

        return vllm_needs(config, self.stage, self.stage.checkpoint(model), self.engine_type)

    def make_input_processor(self, model: str) -> "OmniInputProcessor | None":
        from vllm_omni.engine.engine_args import create_config_for_inputs
        from vllm_omni.engine.input_processor import OmniInputProcessor
        from vllm_omni.engine.stage_args import make_engine_args

        if self.stage.engine_input_source:
            return None
        return OmniInputProcessor(create_config_for_inputs(make_engine_args(self.stage, model, self.engine_type)))

    def default_params(self, checkpoint: Callable[[], Mapping[str, Any]] | None) -> Mapping[str, Any]:
        """The defaults of the stage's configuration; without any those of the checkpoint."""
        own = self.stage.default_sampling_params
        return own if own or checkpoint is None else checkpoint()

    def make_engine(
        self, model: str, outbox: "Outbox", workers: "RayWorkers | None" = None, log_stats: bool = False
    ) -> "LLMStageEngine":
        from vllm_omni.stage.engines.llm import LLMStageEngine

        return LLMStageEngine(
            outbox,
            self.stage.stage_id,
            model,
            self.engine_type,
            self.stage.vllm_engine_args,
            workers,
            log_stats,
            transcribes=self.transcribes,
            sample_rate=self.stage.sample_rate,
        )


class Autoregressive(_VllmStage):
    """`AR`: writes tokens one by one."""

    engine_type = "ar"
    is_autoregressive = True

    @classmethod
    def of(cls, name: str, stage: OmniStageConfig) -> StageKind:
        return (Transcribing if stage.accepts == "audio" else cls)(name, stage)

    @property
    def emits_only_text(self) -> bool:
        return self.stage.engine_args.get("engine_output_type", "text") == "text"

    @property
    def gives_text(self) -> bool:
        return self.stage.final_output_type == "text" or self.emits_only_text

    def without_readers(self) -> OmniStageConfig:
        engine_args = self.stage.engine_args | {"engine_output_type": "text"}
        return msgspec.structs.replace(self.stage, engine_args=engine_args)


class Generation(_VllmStage):
    """`generation`: computes everything of a request, or of a window, in one step."""

    engine_type = "generation"


class Transcribing(Autoregressive):
    """`AR` with `accepts: audio`: the engine of a model that vLLM transcribes with, such as Whisper."""

    transcribes = True

    @property
    def accepts_input(self) -> bool:
        return not self.stage.engine_input_source

    @property
    def replaceable_by(self) -> str | None:
        return "function" if self.accepts_input else None

    def kind_with(self, checkpoint: str) -> str | None:
        from vllm_omni.engine.text_models import is_of_vllm
        from vllm_omni.model_executor.transcription_model import find_transcription_class
        from vllm_omni.model_executor.transformers_model import load_config
        from vllm_omni.model_packages import find_models

        if not checkpoint or checkpoint in find_models().made_checkpoints:
            return None
        try:
            hf_config = load_config(checkpoint, {})
        except Exception:  # Of any library that reads it; it is reported where the stage reads it.
            return None
        return None if is_of_vllm(hf_config) or find_transcription_class(hf_config) is None else "transformers"

    def check(self) -> None:
        super().check()
        where = self.stage.label
        if self.stage.final_output_type not in (None, "text"):
            raise StageConfigError(f"{where}: final_output_type: an AR stage that accepts audio makes text")
        if self.stage.custom_prompt_func:
            raise StageConfigError(f"{where}: custom_prompt_func: vLLM makes the prompt of a sound; remove it")

    def modules_to_preload(self, model: str) -> set[str]:
        return {"vllm_omni.stage.engines.transcribing_request"}

    def make_input_processor(self, model: str) -> None:
        """Its own engine makes the prompt of each clip."""

    def load_transcription_model(self, model: str) -> "type[SupportsTranscription]":
        from vllm_omni.engine.engine_args import create_config_for_inputs
        from vllm_omni.engine.stage_args import make_engine_args
        from vllm_omni.engine.transcription import load_transcription_model  # imports vLLM's loaders

        engine_args = make_engine_args(self.stage, model, self.engine_type)
        return load_transcription_model(create_config_for_inputs(engine_args).model_config)

    def load_parameters(self) -> "FunctionParameters":
        from vllm_omni.kinds.parameters import TranscriptionSettings

        return TranscriptionSettings(self.stage)

    def default_params(self, checkpoint: Callable[[], Mapping[str, Any]] | None) -> Mapping[str, Any]:
        """It writes the likeliest text, up to its end."""
        own = self.sampling_values(self.stage.default_sampling_params)
        return {"temperature": 0.0, "max_tokens": None, **own}

    def sampling_values(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        from vllm_omni.inputs import TranscriptionParameters

        own = TranscriptionParameters.__struct_fields__
        return {name: value for name, value in values.items() if name not in own}

    def check_num_outputs(self, n: int) -> None:
        if n > 1:
            raise ValueError(f"n={n} for stage {self.stage.name!r}: a sound has one transcript")
