# SPDX-License-Identifier: Apache-2.0
"""Computed memory compared with running engines; `tests/published` has published checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine import feedback_models
from tests.stage.running_engine import RunningEngine
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.errors import StageConfigError
from vllm_omni.placement import memory_needs
from vllm_omni.placement.memory_needs import StageNeeds, stage_needs

MODEL_ARGS = {"dtype": "float32", "max_model_len": 192, "block_size": 32, "max_num_seqs": 4}


def needs_of(model: Path, **engine_args: Any) -> StageNeeds:
    stage = {"stage_id": 0, "engine_args": engine_args, "final_output": True, "final_output_type": "text"}
    config = parse_pipeline_config({"stage_args": [stage]}, "f")
    needs = stage_needs(config, config.stages[0], str(model))
    assert needs is not None
    return needs


def test_the_kv_cache_equals_a_running_engine_s(ar_session: RunningEngine, tiny_qwen3: Path) -> None:
    engine: OmniLLMEngine = ar_session.engine._engine  # type: ignore[attr-defined]
    runner: Any = engine.model_executor.driver_worker.model_runner
    needs = needs_of(tiny_qwen3, model_arch="HookedQwen3", enable_prompt_embeds=True, **MODEL_ARGS)

    caches = {cache.data_ptr(): cache for cache in runner.kv_caches}
    num_tokens = runner.vllm_config.cache_config.num_gpu_blocks * 32
    assert needs.kv_token == sum(cache.nbytes for cache in caches.values()) / num_tokens
    assert needs.kv_request == needs.kv_token * 192
    assert needs.max_model_len == 192


def test_weights_equal_the_checkpoint_s(tiny_qwen3: Path) -> None:
    needs = needs_of(tiny_qwen3, **MODEL_ARGS)
    parameters = sum(tensor.numel() for tensor in load_file(tiny_qwen3 / "model.safetensors").values())
    assert needs.num_parameters == parameters
    buffers = needs.weights - 4 * parameters
    assert 0 < buffers < 2 << 20  # tables of rotary embeddings


def test_fewer_bits_and_more_tokens(tiny_qwen3: Path) -> None:
    needs = needs_of(tiny_qwen3, **MODEL_ARGS)
    half = needs_of(tiny_qwen3, **MODEL_ARGS | {"dtype": "bfloat16"})
    assert half.kv_token == needs.kv_token / 2
    assert half.weights == pytest.approx(needs.weights / 2, rel=0.01)  # some buffers keep their dtype
    quantized = needs_of(tiny_qwen3, quantization="fp8", **MODEL_ARGS)
    assert half.weights < quantized.weights < needs.weights  # embeddings keep their dtype
    longer = needs_of(tiny_qwen3, **MODEL_ARGS | {"max_model_len": 384})
    assert longer.kv_request == 2 * needs.kv_request
    wider = needs_of(tiny_qwen3, max_num_batched_tokens=8192, **MODEL_ARGS)
    assert wider.activations is not None and needs.activations is not None
    assert wider.activations > needs.activations


def test_what_is_kept_of_requests_is_counted(tiny_qwen3: Path) -> None:
    """`EchoQwen3` keeps three buffers, of the share of each of four requests: a page of 128 rows."""
    feedback_models.register()
    needs = needs_of(tiny_qwen3, model_arch="EchoQwen3", enable_prompt_embeds=True, **MODEL_ARGS)
    without = needs_of(tiny_qwen3, **MODEL_ARGS)
    config = json.loads((tiny_qwen3 / "config.json").read_text())
    assert needs.overhead - without.overhead == 4 * 128 * 4 * (2 * config["hidden_size"] + 1)


def test_several_devices_are_counted_together(tiny_qwen3: Path) -> None:
    assert needs_of(tiny_qwen3, tensor_parallel_size=2, **MODEL_ARGS) == needs_of(tiny_qwen3, **MODEL_ARGS)


def test_an_unknown_quantization_is_an_error(tiny_qwen3: Path) -> None:
    with pytest.raises(StageConfigError, match="quantization 'awq' are not computed"):
        needs_of(tiny_qwen3, quantization="awq", **MODEL_ARGS)


def test_a_stage_without_a_model_needs_nothing() -> None:
    raw = {"stage_id": 0, "engine_type": "fake", "final_output": True, "final_output_type": "text"}
    config = parse_pipeline_config({"stage_args": [raw]}, "f")
    assert stage_needs(config, config.stages[0], "model") is None


def test_layers_are_identified_by_their_number() -> None:
    names = ["model.layers.3.mlp.up", "visual.blocks.0", "visual.merger.mlp.0", "lm_head"]
    found = [memory_needs._LAYER.match(name) for name in names]
    assert [match and match[0] for match in found] == ["model.layers.3", "visual.blocks.0", "visual.merger.mlp.0", None]
