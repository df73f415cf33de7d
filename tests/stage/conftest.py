# SPDX-License-Identifier: Apache-2.0
"""vLLM stage engines, each started once and shared by all tests of a session; an end of the process that is none."""

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.engine.hooked_models import register
from tests.stage.running_engine import RunningEngine
from vllm_omni.stage.engines.base import Outbox
from vllm_omni.stage.engines.llm import LLMStageEngine

BLOCK_SIZE = 32
SAMPLE_RATE = 100
"""Of `vocoder`."""


@pytest.fixture(scope="session")
def start_llm(tiny_qwen3: Path) -> Iterator[Callable[..., RunningEngine]]:
    register()
    running: list[RunningEngine] = []

    def start(engine_type: str, sample_rate: int | None = None, **engine_args: Any) -> RunningEngine:
        defaults = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 4, "enforce_eager": True}
        engine_args = defaults | engine_args
        engine = LLMStageEngine(Outbox(), 1, str(tiny_qwen3), engine_type, engine_args, sample_rate=sample_rate)
        engine.start()
        running.append(RunningEngine(engine))
        return running[-1]

    yield start
    for one in reversed(running):
        one.stop()


@pytest.fixture(scope="session")
def ar_session(start_llm: Callable[..., RunningEngine]) -> RunningEngine:
    return start_llm(
        "ar",
        engine_output_type="latent",
        model_arch="HookedQwen3",
        max_model_len=192,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=11,
        enable_prompt_embeds=True,
    )


@pytest.fixture
def ar(ar_session: RunningEngine) -> RunningEngine:
    """With rows and text, and 10 KV blocks of 32 tokens."""
    return cleared(ar_session)


@pytest.fixture(scope="session")
def vocoder_session(start_llm: Callable[..., RunningEngine]) -> RunningEngine:
    arguments = {"engine_output_type": "audio", "model_arch": "DoublingVocoder", "sample_rate": SAMPLE_RATE}
    return start_llm("generation", **arguments, max_model_len=64, max_num_batched_tokens=64)


@pytest.fixture
def vocoder(vocoder_session: RunningEngine) -> RunningEngine:
    """One-step generation, at most 64 placeholders a step; a code is two samples, at 100 in a second."""
    return cleared(vocoder_session)


def cleared(running: RunningEngine) -> RunningEngine:
    running.items.clear()
    running.counter.batch_sizes.clear()
    running.counter.after.clear()
    return running


class Ended:
    """Replaces the end of the process: ends only the watchdog's thread."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.happened = threading.Event()

    def __call__(self, message: str) -> NoReturn:
        faulthandler.cancel_dump_traceback_later()
        self.messages.append(message)
        self.happened.set()
        sys.exit()


@pytest.fixture
def ended() -> Iterator[Ended]:
    """No timer of faulthandler outlives the test, whose process it would end."""
    yield Ended()
    faulthandler.cancel_dump_traceback_later()
