# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes are read alike in flags, in files and in arguments."""

import argparse
from typing import Any

import pytest
from vllm.utils.argparse_utils import human_readable_int

from vllm_omni.config.dit_config import parse_dit_config
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.overrides import override_stage
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.config.utils import parse_bytes
from vllm_omni.entrypoints.cli_args import byte_size
from vllm_omni.errors import StageConfigError

SIZES = {
    "0": 0,
    "4096": 4096,
    "9007199254740993": 9007199254740993,  # more than a float has digits for
    "1e6": 1_000_000,
    "900GiB": 900 << 30,
    "4GiB": 4 << 30,
    " 512 mib ": 512 << 20,
    "1.5GB": 1_500_000_000,
    "64B": 64,
    "4G": 4 << 30,
    "4g": 4_000_000_000,
}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes(text: str, size: int) -> None:
    assert (parse_bytes(text), byte_size(text)) == (size, size)


@pytest.mark.parametrize("text", ["7", "1k", "1K", "25.6k", "2M", "2m", "3G", "3g", "1T", "1t"])
def test_vllms_own_sizes_mean_the_same(text: str) -> None:
    assert parse_bytes(text) == human_readable_int(text)


@pytest.mark.parametrize("text", ["", "much", "GiB", "-1", "0.5", "1.2.3GiB", "4XB", "4 G B", "inf", "nan", "1e999GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"a number of bytes; write 4096|more bytes than any machine has"):
        parse_bytes(text)
    with pytest.raises(argparse.ArgumentTypeError):
        byte_size(text)


def pipeline(engine_args: dict[str, Any], runtime: dict[str, Any]) -> PipelineConfig:
    stage = {"stage_id": 0, "engine_type": "AR", "engine_args": {"model_stage": "llm", **engine_args}}
    stage |= {"final_output": True, "final_output_type": "text"}
    return parse_pipeline_config({"stage_args": [stage], "runtime": runtime}, "my.yaml")


def test_sizes_in_a_stage_configuration() -> None:
    config = pipeline({"kv_cache_memory_bytes": "64MiB"}, {"defaults": {"high_watermark_bytes": "1GiB"}})
    assert config.stage_args[0].engine_args["kv_cache_memory_bytes"] == 64 << 20
    assert config.runtime.defaults.high_watermark_bytes == 1 << 30


def test_a_wrong_size_in_a_stage_configuration_is_named() -> None:
    with pytest.raises(StageConfigError, match=r"my\.yaml: .*high_watermark_bytes.*'much' is not a number of bytes"):
        pipeline({}, {"defaults": {"high_watermark_bytes": "much"}})


def test_sizes_of_a_diffusion_stage() -> None:
    assert parse_dit_config({"prompt_cache_bytes": "1GiB"}, "stage 0 (dit)").prompt_cache_bytes == 1 << 30
    with pytest.raises(StageConfigError, match=r"engine_args\.prompt_cache_bytes: 'much' is not a number of bytes"):
        parse_dit_config({"prompt_cache_bytes": "much"}, "stage 0 (dit)")


def test_sizes_among_arguments_of_a_program() -> None:
    overrides = {"llm": {"kv_cache_memory_bytes": "1GiB"}}
    args = OmniArgs.from_kwargs(
        model="model", shm_threshold_bytes="64KiB", kv_cache_memory_bytes="2GiB", stage_overrides=overrides
    )
    assert args.shm_threshold_bytes == 64 << 10
    assert args.engine_args == {"kv_cache_memory_bytes": 2 << 30}
    stage = override_stage(pipeline({}, {}).stage_args[0], args.stage_overrides["llm"])
    assert stage.engine_args["kv_cache_memory_bytes"] == 1 << 30
    with pytest.raises(StageConfigError, match=r"stage_overrides\.llm\.kv_cache_memory_bytes: 'much' is not"):
        OmniArgs.from_kwargs(model="model", stage_overrides={"llm": {"kv_cache_memory_bytes": "much"}})
