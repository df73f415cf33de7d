# SPDX-License-Identifier: Apache-2.0
"""The engines that a stage can run, and the one place that chooses among them."""

from vllm_omni.config.dit_config import parse_dit_config
from vllm_omni.config.resources import parse_memory
from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.stage.engines.base import Outbox, StageEngine

_FUNCTION_BATCH_SIZE = 8


def make_stage_engine(stage: OmniStageConfig, model: str, outbox: Outbox) -> StageEngine:
    """The engine of a stage, not yet started."""
    if stage.runs_vllm:
        # Imported here: a stage without a vLLM engine need not load one.
        from vllm_omni.stage.engines.llm import LLMStageEngine

        return LLMStageEngine(outbox, stage.stage_id, model, stage.kind.lower(), stage.vllm_engine_args)
    if stage.kind == "function":
        from vllm_omni.stage.engines.function import BatchFunctionStageEngine, FunctionStageEngine

        if stage.batch_function is not None:
            batch_size = stage.runtime.max_batch_size or _FUNCTION_BATCH_SIZE
            return BatchFunctionStageEngine(outbox, stage.stage_id, stage.batch_function, batch_size)
        assert stage.function is not None
        return FunctionStageEngine(outbox, stage.stage_id, stage.function)
    if stage.kind == "fake":
        from vllm_omni.stage.engines.fake import FakeStageEngine

        return FakeStageEngine(outbox, stage.stage_id, stage.name)
    # Imported here: it brings diffusers.
    from vllm_omni.stage.engines.diffusion import DiffusionStageEngine

    config = parse_dit_config(stage.dit_engine_args, f"stage {stage.stage_id} ({stage.name})")
    memory = None if stage.runtime.memory is None else parse_memory(stage.runtime.memory)
    return DiffusionStageEngine(outbox, stage.stage_id, model, config, memory)
