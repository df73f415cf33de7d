# SPDX-License-Identifier: Apache-2.0
"""Rows of a stage that is scheduled while the step before is computed are those of steps one after the other."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.engine.conftest import BLOCK_SIZE
from tests.engine.overlap import overlapping_steps
from tests.engine.running import finish, greedy, last_outputs, random_prompts, run, runner_of, step_until_idle
from vllm_omni.core.sched.omni_ar_scheduler import OmniAsyncARScheduler
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(40, 7, 90, 33, 20, 64, seed=5)]
STREAMED = RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def async_engine(start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path) -> Iterator[OmniLLMEngine]:
    """Its requests preempt each other, and long prompts have several steps."""
    with overlapping_steps():
        engine = start_engine(
            tiny_qwen3,
            engine_output_type="latent",
            enable_prefix_caching=True,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=48,
            max_model_len=160,
            num_gpu_blocks_override=9,
            async_scheduling=True,
        )
        assert isinstance(engine._scheduler, OmniAsyncARScheduler)
        assert isinstance(runner_of(engine), GPUARModelRunner)
        yield engine


@pytest.fixture(autouse=True)
def empty(async_engine: OmniLLMEngine) -> Iterator[None]:
    """Nothing is cached before a test, and nothing is kept of its requests after it."""
    assert async_engine.reset_prefix_cache()
    yield
    tracker = runner_of(async_engine)._row_tracker
    while async_engine.has_work():
        async_engine.step()
    assert (tracker._next_position, tracker._pending) == ({}, {})
    assert async_engine.kv_blocks()[0] == 0


def rows_of(outputs: list[RequestOutput]) -> torch.Tensor:
    return torch.cat([part.multimodal_output["hidden"] for part in outputs if part.multimodal_output])  # type: ignore[attr-defined]


def assert_same(outputs: list[list[RequestOutput]], expected: list[RequestOutput]) -> None:
    """Each request's outputs in order have the tokens and rows of one, and a row leaves with the token after it."""
    for parts, good in zip(outputs, expected, strict=True):
        tokens = [token for part in parts for token in part.outputs[0].token_ids]
        assert tokens == list(good.outputs[0].token_ids)
        num_rows = len(good.prompt_token_ids or ()) + len(tokens) - 1
        assert len(rows_of([good])) == len(rows_of(parts)) == num_rows
        torch.testing.assert_close(rows_of(parts), rows_of([good]), atol=1e-4, rtol=1e-4)
        for part in parts[1:]:
            assert len(rows_of([part])) == len(part.outputs[0].token_ids)


@pytest.mark.parametrize("output_kind", [RequestOutputKind.FINAL_ONLY, STREAMED], ids=["whole", "streamed"])
def test_has_the_same_rows(
    async_engine: OmniLLMEngine, latent_engine: OmniLLMEngine, output_kind: RequestOutputKind
) -> None:
    expected = run(latent_engine, PROMPTS, greedy(24))
    for index, prompt in enumerate(PROMPTS):
        async_engine.add_request(str(index), prompt, greedy(24, output_kind=output_kind))
    parts: dict[str, list[RequestOutput]] = {str(index): [] for index in range(len(PROMPTS))}
    for output in step_until_idle(async_engine):
        parts[output.request_id].append(output)
    assert_same(list(parts.values()), expected)


def test_has_the_rows_of_tokens_that_were_cached(async_engine: OmniLLMEngine, latent_engine: OmniLLMEngine) -> None:
    prompt = PROMPTS[2:3]
    (expected,) = run(latent_engine, prompt, greedy(12))
    for num_cached in (0, 64):
        (output,) = run(async_engine, prompt, greedy(12))
        assert output.num_cached_tokens == num_cached
        assert_same([[output]], [expected])


def test_a_prompt_whose_rows_have_not_arrived_counts_as_not_cached(
    async_engine: OmniLLMEngine, latent_engine: OmniLLMEngine
) -> None:
    (expected,) = run(latent_engine, PROMPTS[2:3], greedy(4))
    async_engine.add_request("0", PROMPTS[2], greedy(4))
    async_engine.step()
    async_engine.step()
    async_engine.add_request("1", PROMPTS[2], greedy(4))
    assert_same([[output] for output in last_outputs(async_engine)], [expected, expected])


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_an_abort_leaves_nothing(async_engine: OmniLLMEngine, latent_engine: OmniLLMEngine, num_steps: int) -> None:
    """At any time: while parts of its prompt are computed, and after it."""
    expected = run(latent_engine, PROMPTS[:1], greedy(12))
    async_engine.add_request("1", PROMPTS[2], greedy(12))
    async_engine.add_request("0", PROMPTS[0], greedy(12))
    for _ in range(num_steps):
        async_engine.step()
    async_engine.abort_request(["1"])
    assert_same([[output] for output in last_outputs(async_engine)], expected)


def test_requests_without_rows(async_engine: OmniLLMEngine, latent_engine: OmniLLMEngine) -> None:
    expected = run(latent_engine, PROMPTS[:2], greedy(12))
    for index in range(2):
        async_engine.add_request(str(index), PROMPTS[index], greedy(12))
    async_engine.discard_rows("1", first=0)
    with_rows, without = last_outputs(async_engine)
    assert_same([[with_rows]], expected[:1])
    assert without.outputs[0].token_ids == expected[1].outputs[0].token_ids
    assert without.multimodal_output == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["_update_states", "_model_forward", "_sample", "_bookkeeping_sync"])
@pytest.mark.parametrize("num_good_calls", [0, 1, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seed"])
def test_no_row_is_lost_or_doubled_when_a_step_raises(
    async_engine: OmniLLMEngine,
    latent_engine: OmniLLMEngine,
    break_once: Callable[..., None],
    method: str,
    num_good_calls: int,
    temperature: float,
) -> None:
    """Neither of that step nor of the one before it, whose output was not fetched."""
    prompts, params = [PROMPTS[2], PROMPTS[0]], greedy(12)
    if temperature:
        params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True, temperature=temperature)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    expected = run(latent_engine, prompts, params)
    params.output_kind = STREAMED
    for index, prompt in enumerate(prompts):
        async_engine.add_request(str(index), prompt, params)
    break_once(runner_of(async_engine), method, num_good_calls)
    outputs = finish(async_engine)
    assert_same([outputs[str(index)] for index in range(2)], expected)
