# SPDX-License-Identifier: Apache-2.0
"""Pipelines of real vLLM stages, each started once for all tests of a session."""

import copy
import functools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.transformers_utils import config as vllm_hf_config

from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.entrypoints.pipeline import Pipeline
from vllm_omni.entrypoints.resolve import apply_arguments

CSM_FRAMES = 30


def start(model: Path, **arguments: object) -> OmniLLM:
    return OmniLLM(
        str(model), dtype="float32", max_num_seqs=8, kv_cache_memory_bytes=64 << 20, enforce_eager=True, **arguments
    )


def as_async(llm: OmniLLM, **params: dict[str, Any]) -> AsyncOmniLLM:
    """The same pipeline as an `AsyncOmniLLM`, whose end does not close it. `params`: other default sampling parameters
    of its stages, by name."""
    config, builder = llm._pipeline.config, copy.copy(llm._pipeline.builder)  # Which numbers all requests.
    if params:
        overrides = {name: {"default_sampling_params": each} for name, each in params.items()}
        config = builder._config = apply_arguments(config, {}, overrides)
        builder._default_params = {id_: builder._make_default_params(config.stages[id_]) for id_ in config.stages}
    pipeline = Pipeline(config, llm._pipeline.orchestrator, builder)
    with mock.patch("vllm_omni.entrypoints.omni_base.launch_pipeline", lambda *args, **kwargs: pipeline):
        async_llm = AsyncOmniLLM("")
    async_llm._finalizer.detach()
    async_llm._finalizer = weakref.finalize(async_llm, lambda: None)
    return async_llm


@pytest.fixture
def without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads a configuration that it cannot read once more after 2 s: it may be downloaded meanwhile."""
    at_once = functools.partial(vllm_hf_config.with_retry, retry_delay=0)
    monkeypatch.setattr(vllm_hf_config, "with_retry", at_once)


@pytest.fixture(scope="session")
def talking_llm(tiny_qwen3_omni_moe: Path) -> Iterator[OmniLLM]:
    """Qwen3-Omni with the shipped configuration, up to 1024 tokens and frames."""
    with start(tiny_qwen3_omni_moe, max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="session")
def talking_async_llm(talking_llm: OmniLLM) -> AsyncOmniLLM:
    return as_async(talking_llm)


@pytest.fixture(scope="session")
def qwen2_5_llm(tiny_qwen2_5_omni: Path) -> Iterator[OmniLLM]:
    """Qwen2.5-Omni, whose thinker supports adapters: it is dense, and vLLM has none for experts on a CPU."""
    with start(tiny_qwen2_5_omni, max_model_len=512, stage_overrides={"thinker": {"enable_lora": True}}) as llm:
        yield llm


@pytest.fixture(scope="session")
def qwen2_5_async_llm(qwen2_5_llm: OmniLLM) -> AsyncOmniLLM:
    return as_async(qwen2_5_llm)


@pytest.fixture(scope="session")
def csm_llm(tiny_csm: Path) -> Iterator[OmniLLM]:
    """A model that only speaks, greedily, up to `CSM_FRAMES` frames."""
    greedy = {"default_sampling_params": {"temperature": 0.0, "max_tokens": CSM_FRAMES + 1}}
    with start(tiny_csm, max_model_len=512, stage_overrides={"backbone": greedy}) as llm:
        yield llm


@pytest.fixture(scope="session")
def csm_async_llm(csm_llm: OmniLLM) -> AsyncOmniLLM:
    return as_async(csm_llm)


@pytest.fixture(scope="session")
def text_llm(tiny_qwen3: Path) -> Iterator[OmniLLM]:
    """A text model with all of vLLM's optional features enabled."""
    with start(
        tiny_qwen3,
        max_model_len=256,
        block_size=32,  # the smallest of CPU attention
        max_logprobs=-1,
        logprobs_mode="processed_logprobs",
        logits_processors=["tests.entrypoints.custom_logits:KeepTokens"],
        enable_prefix_caching=True,
        enable_lora=True,
        max_lora_rank=8,
    ) as llm:
        yield llm


@pytest.fixture(scope="session")
def text_async_llm(text_llm: OmniLLM) -> AsyncOmniLLM:
    return as_async(text_llm)
