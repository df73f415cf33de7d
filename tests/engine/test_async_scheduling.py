# SPDX-License-Identifier: Apache-2.0
"""A stage of text that is scheduled while the step before is computed writes what it writes when scheduled after it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm import envs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from tests.engine.conftest import BLOCK_SIZE
from tests.engine.overlap import overlapping_steps
from tests.engine.running import Broken, finish, greedy, last_outputs, random_prompts, run, runner_of, step_until_idle
from vllm_omni.core.sched.omni_ar_scheduler import OmniAsyncARScheduler
from vllm_omni.core.sched.output import StepRecord
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.errors import StageConfigError
from vllm_omni.payloads import Guidance
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_text_model_runner import GPUTextModelRunner

PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(40, 7, 90, 33, 20, 64, seed=5)]


@pytest.fixture(scope="module", params=["v1", "v2"] if HAS_TRITON else ["v1"])
def async_engine(
    request: pytest.FixtureRequest, start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path
) -> Iterator[OmniLLMEngine]:
    """Its requests preempt each other. On each of vLLM's model runners that can be had here."""
    with overlapping_steps() as patch:
        envs.disable_envs_cache()  # vLLM caches the environment from an engine's start on.
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", {"v1": "0", "v2": "1"}[request.param])
        engine = start_engine(
            tiny_qwen3,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=64,
            max_model_len=160,
            num_gpu_blocks_override=9,
            async_scheduling=True,
        )
        assert isinstance(engine._scheduler, OmniAsyncARScheduler)
        assert isinstance(runner_of(engine), {"v1": GPUARModelRunner, "v2": GPUTextModelRunner}[request.param])
        yield engine


@pytest.fixture
def good_engine(async_engine: OmniLLMEngine, text_engine: OmniLLMEngine) -> OmniLLMEngine:
    """Writes what is expected. What a seed draws depends on the model runner, and `text_engine` has V1."""
    return async_engine if has_v2_runner(async_engine) else text_engine


def has_v2_runner(engine: OmniLLMEngine) -> bool:
    return isinstance(runner_of(engine), GPUTextModelRunner)


PARAMS = {
    "greedy": greedy(12),
    "seed": SamplingParams(max_tokens=12, seed=7, ignore_eos=True, logprobs=2),
    "sequences": SamplingParams(max_tokens=12, seed=7, n=3, ignore_eos=True),
    "penalties": greedy(12, repetition_penalty=1.4, frequency_penalty=0.8, min_tokens=5, prompt_logprobs=1),
    "grammar": greedy(24, structured_outputs=StructuredOutputsParams(regex="[ab]{7}(cd){3}x*"), ignore_eos=False),
}


@pytest.fixture(params=PARAMS.values(), ids=list(PARAMS))
def params(request: pytest.FixtureRequest) -> SamplingParams:
    request.param.output_kind = RequestOutputKind.FINAL_ONLY
    return request.param


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, good in zip(outputs, expected, strict=True):
        for one, other in zip(output.outputs, good.outputs, strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
            assert len(one.logprobs or ()) == len(other.logprobs or ())
        assert len(output.prompt_logprobs or ()) == len(good.prompt_logprobs or ())


def test_writes_the_same(
    async_engine: OmniLLMEngine, text_engine: OmniLLMEngine, good_engine: OmniLLMEngine, params: SamplingParams
) -> None:
    expected = run(text_engine if params.seed is None else good_engine, PROMPTS, params)
    assert_same(run(async_engine, PROMPTS, params), expected)
    assert async_engine.kv_blocks()[0] == 0


def test_writes_forced_tokens_as_with_a_grammar(async_engine: OmniLLMEngine, text_engine: OmniLLMEngine) -> None:
    forced = [[9, 300, 9], [40, 41], [7] * 30]
    prompts = [{**prompt, "forced_token_ids": each} for prompt, each in zip(PROMPTS, forced, strict=False)]
    for engine in (async_engine, text_engine):
        outputs = run(engine, prompts, greedy(40, ignore_eos=False))
        written = [list(output.outputs[0].token_ids[:-1]) for output in outputs]
        assert written == forced[: len(prompts)]
        assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_ends_where_each_stops(async_engine: OmniLLMEngine, text_engine: OmniLLMEngine) -> None:
    """A step more is computed of a request that ends with its token."""
    ends = [
        output.outputs[0].token_ids[4 + index] for index, output in enumerate(run(text_engine, PROMPTS, greedy(24)))
    ]
    results = []
    for engine in (async_engine, text_engine):
        for index, (prompt, end) in enumerate(zip(PROMPTS, ends, strict=True)):
            engine.add_request(str(index), prompt, greedy(24, stop_token_ids=[end]))
        results.append(last_outputs(engine))
    assert_same(*results)
    assert all(len(output.outputs[0].token_ids) <= 5 + index for index, output in enumerate(results[0]))
    assert async_engine.kv_blocks()[0] == 0


def test_abort_while_a_step_is_computed(async_engine: OmniLLMEngine, text_engine: OmniLLMEngine) -> None:
    expected = run(text_engine, PROMPTS[:2], greedy(24))
    for index, prompt in enumerate(PROMPTS[:3]):
        async_engine.add_request(str(index), prompt, greedy(24))
    for _ in range(8):
        async_engine.step()
    async_engine.abort_request(["2"])
    assert_same(last_outputs(async_engine), expected)
    async_engine.add_request("0", PROMPTS[0], greedy(24))
    while async_engine.kv_blocks()[0] == 0:
        async_engine.step()
    async_engine.abort_request(["0"])
    while async_engine.has_work():
        async_engine.step()
    assert async_engine.kv_blocks()[0] == 0 and runner_of(async_engine).discard_step() == []


def test_waits_for_input(async_engine: OmniLLMEngine, text_engine: OmniLLMEngine) -> None:
    """The tokens that are being computed count."""
    expected = run(text_engine, PROMPTS[:1], greedy(12))
    async_engine.add_request("0", PROMPTS[0], greedy(12))
    async_engine.await_input("0", 44)
    while async_engine.has_work():
        async_engine.step()
    assert async_engine._scheduler.requests[async_engine._internal_ids("0")[0]].num_tokens == 45
    async_engine.add_input("0", {}, None, is_last=True)
    assert_same(step_until_idle(async_engine), expected)


def test_a_request_that_is_isolated(async_engine: OmniLLMEngine, text_engine: OmniLLMEngine) -> None:
    expected = run(text_engine, PROMPTS[:3], greedy(12))
    for index, prompt in enumerate(PROMPTS[:3]):
        async_engine.add_request(str(index), prompt, greedy(12))
    batches: list[set[str]] = []
    async_engine.watch_steps(lambda step: batches.append(set(step.num_computed_tokens)), lambda step: None)
    async_engine.isolate("1", 12)
    assert_same(last_outputs(async_engine), expected)
    async_engine.watch_steps(lambda step: None, lambda step: None)
    with_it = [batch for batch in batches if "1" in batch]
    assert with_it[0] == {"1"} and any(len(batch) == 3 for batch in with_it)


METHODS = {
    "states": ("_update_states", "update_requests"),
    "forward": ("_model_forward", "prepare_attn"),
    "sampling": ("_sample", "sample"),
    "bookkeeping": ("_bookkeeping_sync", "postprocess_sampled"),
}
"""Of the V1 and the V2 model runner, by what a step does there."""


@pytest.mark.parametrize("part", ["forward", "sampling"])
def test_the_step_that_raised_is_named(
    async_engine: OmniLLMEngine, text_engine: OmniLLMEngine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """And not the one beside it."""
    expected = run(text_engine, PROMPTS[:3], greedy(12))
    for index, prompt in enumerate(PROMPTS[:3]):
        async_engine.add_request(str(index), prompt, greedy(12))
    async_engine.isolate("1", 12)
    steps: list[StepRecord] = []
    async_engine.watch_steps(steps.append, lambda step: None)
    runner, method = runner_of(async_engine), METHODS[part][has_v2_runner(async_engine)]
    good = getattr(runner, method)

    def raise_alone(*args: object, **kwargs: object) -> object:
        if steps and steps[-1].num_computed_tokens.keys() == {"1"} and async_engine._core.is_computing:
            monkeypatch.undo()
            raise Broken
        return good(*args, **kwargs)

    monkeypatch.setattr(runner, method, raise_alone)
    with pytest.raises(Broken):
        step_until_idle(async_engine)
    assert async_engine.failed_batch().keys() == {"1"}
    assert async_engine.recover() == []
    assert_same(last_outputs(async_engine), expected)


def test_scheduling_that_raises_names_no_request(
    async_engine: OmniLLMEngine, text_engine: OmniLLMEngine, break_once: Callable[..., None]
) -> None:
    expected = run(text_engine, PROMPTS[:2], greedy(12))
    for index, prompt in enumerate(PROMPTS[:2]):
        async_engine.add_request(str(index), prompt, greedy(12))
    break_once(async_engine._scheduler, "_order_requests", 5)
    with pytest.raises(Broken):
        step_until_idle(async_engine)
    assert async_engine._core.is_computing and async_engine.failed_batch() == {}
    assert async_engine.recover() == []
    assert_same(last_outputs(async_engine), expected)


def test_requests_whose_tokens_were_lost_end(async_engine: OmniLLMEngine, break_once: Callable[..., None]) -> None:
    for index, prompt in enumerate(PROMPTS[:2]):
        async_engine.add_request(str(index), prompt, greedy(12))
    break_once(async_engine.output_processor, "process_outputs", 6)
    with pytest.raises(Broken):
        step_until_idle(async_engine)
    assert sorted(async_engine.recover()) == ["0", "1"]
    assert not async_engine.has_unfinished_requests() and async_engine.kv_blocks()[0] == 0


def test_guidance_is_refused(async_engine: OmniLLMEngine) -> None:
    prompt = {**PROMPTS[0], "guidance": Guidance([1, 2, 3], 2.0)}
    with pytest.raises(ValueError, match="set its async_scheduling to false"):
        async_engine.add_request("0", prompt, greedy(4))


@pytest.mark.parametrize("part", METHODS)
@pytest.mark.parametrize("num_good_calls", [0, 6])
def test_loses_nothing_when_a_step_raises(
    async_engine: OmniLLMEngine,
    good_engine: OmniLLMEngine,
    params: SamplingParams,
    break_once: Callable[..., None],
    part: str,
    num_good_calls: int,
) -> None:
    """Neither that step nor the one before it, whose output was not fetched."""
    if params.structured_outputs is None:
        params = params.clone()
        params.max_tokens = max(5, num_good_calls + 3)
    expected = run(good_engine, PROMPTS[:2], params)
    for index, prompt in enumerate(PROMPTS[:2]):
        async_engine.add_request(str(index), prompt, params)
    break_once(runner_of(async_engine), METHODS[part][has_v2_runner(async_engine)], num_good_calls)
    outputs = finish(async_engine)
    assert_same([outputs[str(index)][-1] for index in range(2)], expected)


@pytest.mark.skipif(not HAS_TRITON, reason="the V2 model runner needs Triton")
@pytest.mark.parametrize("async_engine", ["v2"], indirect=True)
@pytest.mark.parametrize("part", ["block_tables.append_block_ids", "lora_state.add_request", "sampler.add_request"])
def test_half_added_requests_leave_nothing(
    async_engine: OmniLLMEngine, text_engine: OmniLLMEngine, break_once: Callable[..., None], part: str
) -> None:
    """The V2 model runner stages what it writes to its tables; in one write to the device no row has an order."""
    prompts, params = PROMPTS[:4], greedy(12, repetition_penalty=1.4, logit_bias={7: 2.0})
    expected = run(text_engine, prompts, params)
    for index, prompt in enumerate(prompts):
        async_engine.add_request(str(index), prompt, params)
    runner, (owner, method) = runner_of(async_engine), part.split(".")
    break_once(getattr(runner, owner), method, 1)
    with pytest.raises(Broken):
        step_until_idle(async_engine)
    states = (runner.req_states, *runner.sampler.logits_processors)
    values = [value for state in states for value in vars(state).values()] + runner.block_tables.block_tables
    tables = [value for value in values if isinstance(value, StagedWriteTensor)]
    assert any(table._staged_write_indices for table in tables)
    assert async_engine.recover() == []
    assert not any(table._staged_write_indices for table in tables)
    assert_same(last_outputs(async_engine), expected)


@pytest.mark.skipif(not HAS_TRITON, reason="the V2 model runner needs Triton")
@pytest.mark.parametrize("async_engine", ["v2"], indirect=True)
def test_a_model_with_hooks_says_how_to_run_it(
    async_engine: OmniLLMEngine, start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path
) -> None:
    with pytest.raises(StageConfigError, match=r"HookedQwen3 has hooks.* async_scheduling to false"):
        start_engine(tiny_qwen3, model_arch="HookedQwen3", async_scheduling=True, block_size=BLOCK_SIZE)
