# SPDX-License-Identifier: Apache-2.0
"""The flags of vLLM's engines that the documentation names: each reaches every stage of an omni model, or none."""

import dataclasses
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs

from tests.docs.pages import PAGES
from tests.metrics.collector import Collector
from vllm_omni import OmniLLM
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.resolve import resolve_pipeline
from vllm_omni.testing.media import make_prompt

GIVEN: dict[str, Any] = {
    "allowed_local_media_path": "/",
    "allowed_media_domains": ["localhost"],
    "async_scheduling": False,
    "data_parallel_size": 1,
    "disable_log_stats": True,
    "dtype": "float32",
    "enable_lora": False,
    "gpu_memory_utilization": 0.5,
    "load_format": "safetensors",
    "log_level": "INFO",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "mm_processor_cache_gb": 0,
    "nnodes": 1,
    "reasoning_parser": "qwen3",
    "revision": "main",
    "seed": 1,
    "served_model_name": ["a", "b"],
    "shutdown_timeout": 0,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    "trust_remote_code": False,
}
OTHERS = {
    "log_config_file": "of processes, which have it through the environment",
    "model": "every start has one",
    "otlp_traces_endpoint": "needs a collector, given below",
    "profiler_config": "needs a folder; started by test_offline_operations.py",
    "skip_tokenizer_init": "of a stage without a text: the talker and the vocoder have it",
    "tokenizer": "a folder, given below",
}
"""Not among these, and why."""


@pytest.fixture(scope="module")
def reasoning_model(tiny_qwen3_omni_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer has the tokens that vLLM's parser looks up."""
    folder = tmp_path_factory.mktemp("reasoning") / "model"
    shutil.copytree(tiny_qwen3_omni_moe, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    return folder


def test_every_documented_flag_is_tried() -> None:
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    flags = {flag for page in PAGES for flag in re.findall(r"--([a-z][a-z-]+)", page.read_text())}
    names = {flag.replace("-", "_").removeprefix("no_") for flag in flags}
    assert names & known == GIVEN.keys() | OTHERS.keys()


def test_each_stage_is_configured(reasoning_model: Path) -> None:
    config = resolve_pipeline(OmniArgs.from_kwargs(model=str(reasoning_model), **GIVEN)).config
    parsers = {}
    for stage in config.stage_args:
        vllm_config = stage.kind.check_arguments(str(reasoning_model)).create_engine_config()
        parsers[stage.name] = vllm_config.structured_outputs_config.reasoning_parser
        assert vllm_config.scheduler_config.max_num_seqs == 4
    assert parsers == {"thinker": "qwen3", "talker": "", "code2wav": ""}


@pytest.mark.slow
def test_the_pipeline_starts_and_speaks(reasoning_model: Path) -> None:
    short = [{"max_tokens": 4}, {"max_tokens": 12}, None]
    with (
        closing(Collector()) as collector,
        OmniLLM(
            str(reasoning_model), tokenizer=str(reasoning_model), otlp_traces_endpoint=collector.url, **GIVEN
        ) as llm,
    ):
        text, speech = llm.generate(make_prompt(reasoning_model, "text"), short, use_tqdm=False)
    assert text.outputs[0].token_ids and len(speech.multimodal_output["audio"])
