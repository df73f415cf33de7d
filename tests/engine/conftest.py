# SPDX-License-Identifier: Apache-2.0
"""A few real engines, each started once and shared by all tests of a session."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hooked_models import register
from tests.engine.running import Broken
from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.testing.hf_oracle import HFTextOracle

BLOCK_SIZE = 32
"""The smallest that attention on the CPU takes."""


@pytest.fixture(scope="session")
def running_engines() -> Iterator[list[OmniLLMEngine]]:
    """Closed at the end of the session, last first."""
    register()
    engines: list[OmniLLMEngine] = []
    yield engines
    for engine in reversed(engines):
        engine.close()


@pytest.fixture(scope="session")
def thinker_engine(running_engines: list[OmniLLMEngine], tiny_qwen3_omni_moe: Path) -> OmniLLMEngine:
    """Hidden states of a model with M-RoPE and images."""
    return start(
        running_engines,
        tiny_qwen3_omni_moe,
        engine_output_type="latent",
        max_num_batched_tokens=32,
        block_size=BLOCK_SIZE,
        limit_mm_per_prompt={"image": 1, "video": 0, "audio": 0},
    )


@pytest.fixture(scope="session")
def start_engine(running_engines: list[OmniLLMEngine], thinker_engine: OmniLLMEngine) -> Callable[..., OmniLLMEngine]:
    """Starts an engine that lives until the end of the session.

    After the thinker's, because it is a mixture of experts: vLLM makes its groups with the first engine of a process,
    and those of experts only if that one needs them.
    """
    return functools.partial(start, running_engines)


def start(engines: list[OmniLLMEngine], model: Path, **arguments: Any) -> OmniLLMEngine:
    defaults = {
        "dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8,
        "enforce_eager": True,
    }  # fmt: skip
    engine = OmniLLMEngine.from_omni_engine_args(create_engine_args(str(model), **(defaults | arguments)))
    engines.append(engine)
    return engine


@pytest.fixture(scope="session")
def oracle(tiny_qwen3: Path) -> HFTextOracle:
    return HFTextOracle(tiny_qwen3)


@pytest.fixture(scope="session")
def latent_engine(start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path) -> OmniLLMEngine:
    """Hands out the hidden state of every row; prompts are cut into chunks of at most 32 tokens a step. Also on a GPU
    without asynchronous scheduling."""
    return start_engine(
        tiny_qwen3,
        engine_output_type="latent",
        max_num_batched_tokens=32,
        block_size=BLOCK_SIZE,
        enable_prompt_embeds=True,
        async_scheduling=False,
    )


@pytest.fixture(scope="session")
def text_engine(start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path) -> OmniLLMEngine:
    """Emits tokens only, also on a GPU without asynchronous scheduling."""
    return start_engine(tiny_qwen3, block_size=BLOCK_SIZE, async_scheduling=False)


@pytest.fixture(scope="session")
def hooked_engine(start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path) -> OmniLLMEngine:
    """`HookedQwen3` with room for 10 blocks of 32 tokens, so that requests preempt each other."""
    return start_engine(
        tiny_qwen3,
        engine_output_type="latent",
        model_arch="HookedQwen3",
        skip_tokenizer_init=True,
        enable_prompt_embeds=True,
        max_model_len=160,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=11,
    )


@pytest.fixture(scope="session")
def vocoder_engine(start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path) -> OmniLLMEngine:
    """`DoublingVocoder`, at most 64 placeholders a step."""
    return start_engine(
        tiny_qwen3,
        engine_type="generation",
        engine_output_type="audio",
        model_arch="DoublingVocoder",
        max_model_len=64,
        max_num_batched_tokens=64,
    )


@pytest.fixture
def break_once(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a method of an object raise, once, after so many good calls."""

    def break_method(target: Any, name: str, num_good_calls: int = 0) -> None:
        method, calls = getattr(target, name), iter(range(10_000))

        def broken(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == num_good_calls:
                raise Broken(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(target, name, broken)

    return break_method
