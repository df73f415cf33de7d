# SPDX-License-Identifier: Apache-2.0
"""The settings of a diffusion stage are parsed, or refused with the stage, the key and the remedy."""

from typing import Any

import msgspec
import pytest

from vllm_omni.config.dit_config import DIT_SETTINGS, DiTConfig, parse_dit_config
from vllm_omni.errors import StageConfigError

PARALLEL_SIZES = {"data_parallel_size": 2, "ulysses_degree": 2, "ring_degree": 1}
ALL_SETTINGS: dict[str, Any] = {
    "model": "a/model",
    "model_stage": "dit",
    "engine_output_type": "image",
    "pipeline_class": "ZImagePipeline",
    "part": "denoiser",
    "dtype": "bfloat16",
    "revision": "main",
    "variant": "fp16",
    "use_safetensors": False,
    "trust_remote_code": True,
    "vae_slicing": True,
    "vae_tiling": True,
    "offload": "group",
    "attention_backend": "native",
    "cache_backend": "first_block_cache",
    "cache_config": {"threshold": 0.1},
    "compile": True,
    "quantization": {"quant_backend": "torchao"},
    "data_parallel_size": 1,
    "ulysses_degree": 1,
    "ring_degree": 1,
    "max_loras": 2,
    "lora_modules": {"ink": "adapters/ink"},
    "max_batch_size": 1,
    "batch_wait_ms": 0,
    "prompt_cache_bytes": 1 << 20,
    "max_pixels": 4096,
    "max_frames": 5,
    "max_steps": 4,
    "max_seconds": 30.0,
    "max_outputs": 1,
    "max_trajectory_bytes": 1 << 20,
    "preview_size": 32,
    "profiler_config": {"profiler": "torch", "torch_profiler_dir": "/tmp/traces"},
}


def test_every_setting_is_parsed() -> None:
    assert set(ALL_SETTINGS) == set(DIT_SETTINGS)
    assert msgspec.to_builtins(parse_dit_config(ALL_SETTINGS, "stage 0 (dit)")) == ALL_SETTINGS


def test_the_processes_of_a_denoiser() -> None:
    config = parse_dit_config(PARALLEL_SIZES, "stage 0 (dit)")
    assert (config.world_size, config.context_parallel_size) == (4, 2)


def test_every_setting_has_a_default() -> None:
    assert parse_dit_config({}, "stage 0 (dit)") == DiTConfig()


@pytest.mark.parametrize(
    ("engine_args", "words"),
    [
        ({"vae_slicng": True}, ["no 'vae_slicng'", "did you mean 'vae_slicing'?"]),
        ({"max_model_len": 8}, ["no 'max_model_len'", "known here: model, "]),
        ({"dtype": "half"}, ["engine_args.dtype", "'half'", "known here: auto, float32, bfloat16, float16"]),
        ({"part": "vae"}, ["engine_args.part", "'vae'", "known here: pipeline, encoder, denoiser"]),
        ({"offload": "all"}, ["engine_args.offload", "'all'", "known here: model, group, sequential"]),
        ({"max_steps": "many"}, ["engine_args.max_steps", "`int`", "`str`"]),
        ({"cache_config": [1]}, ["engine_args.cache_config", "`object`", "`array`"]),
        ({"max_batch_size": 0}, ["engine_args.max_batch_size: 0 is out of range", "1 or more"]),
        (
            {"cache_backend": "first_block_cache", "compile": True, "max_batch_size": 4},
            ["engine_args.cache_backend", "outputs are made one at a time", "max_batch_size 4"],
        ),
        ({"compile": "yes"}, ["engine_args.compile", "`bool`"]),
        ({"max_pixels": 0}, ["engine_args.max_pixels: 0", "1 or more"]),
        ({"max_frames": -1}, ["engine_args.max_frames: -1", "1 or more"]),
        ({"max_steps": 0}, ["engine_args.max_steps: 0", "1 or more"]),
        ({"max_outputs": 0}, ["engine_args.max_outputs: 0", "1 or more"]),
        ({"max_loras": 0}, ["engine_args.max_loras: 0", "1 or more"]),
        ({"preview_size": 0}, ["engine_args.preview_size: 0", "1 or more"]),
        ({"batch_wait_ms": -0.5}, ["engine_args.batch_wait_ms: -0.5", "0 or more"]),
        ({"batch_wait_ms": float("nan")}, ["engine_args.batch_wait_ms: nan", "0 or more"]),
        ({"batch_wait_ms": float("inf")}, ["engine_args.batch_wait_ms: inf", "0 or more"]),
        ({"cache_config": {"threshold": 0.1}}, ["engine_args.cache_config", "no cache_backend"]),
        ({"part": "encoder", "vae_tiling": True}, ["engine_args.vae_tiling", "part: encoder", "part: denoiser"]),
        ({"data_parallel_size": 0}, ["engine_args.data_parallel_size: 0", "1 or more"]),
        ({"ulysses_degree": 2, "ring_degree": 2}, ["engine_args.ring_degree", "remove it, or ulysses_degree"]),
        ({"data_parallel_size": 2, "compile": True}, ["engine_args.compile", "together with data_parallel_size"]),
        ({"ulysses_degree": 2, "offload": "group"}, ["engine_args.offload", "together with ulysses_degree"]),
        ({"ring_degree": 2, "cache_backend": "mag_cache"}, ["engine_args.cache_backend", "with ring_degree"]),
        ({"data_parallel_size": 2, "quantization": {"quant_backend": "torchao"}}, ["engine_args.quantization"]),
        ({"data_parallel_size": 2, "lora_modules": {"ink": "ink"}}, ["engine_args.lora_modules"]),
        ({"part": "encoder", "data_parallel_size": 2}, ["engine_args.data_parallel_size", "part: encoder"]),
        ({"part": "encoder", "compile": True}, ["engine_args.compile", "part: encoder"]),
        ({"part": "encoder", "cache_backend": "mag_cache"}, ["engine_args.cache_backend", "part: encoder"]),
    ],
)
def test_errors_name_stage_key_and_remedy(engine_args: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(StageConfigError) as caught:
        parse_dit_config(engine_args, "stage 3 (dit)")
    message = str(caught.value)
    assert message.startswith("stage 3 (dit): engine_args")
    for word in words:
        assert word in message, message
