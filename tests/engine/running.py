# SPDX-License-Identifier: Apache-2.0
"""Running requests through an engine, as tests want it."""

import concurrent.futures
from collections import defaultdict
from typing import Any

import torch
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from vllm_omni.core.sched.omni_scheduler_mixin import grammar_of
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine

MAX_STEPS = 2000


class Broken(RuntimeError):
    """What `break_once` raises."""


def greedy(max_tokens: int, **parameters: object) -> SamplingParams:
    defaults = {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(max_tokens=max_tokens, **(defaults | parameters))


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


def step_until_idle(engine: OmniLLMEngine) -> list[RequestOutput]:
    """Everything that comes out until no request is left, in order."""
    outputs: list[RequestOutput] = []
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished_requests():
            return outputs
        if not engine.has_work():
            grammars = map(grammar_of, engine._scheduler.requests.values())
            concurrent.futures.wait([grammar for grammar in grammars if grammar is not None], timeout=60)
        outputs += engine.step()
    raise AssertionError(f"requests are left after {MAX_STEPS} steps")


def run(engine: OmniLLMEngine, prompts: list[dict], params: SamplingParams) -> list[RequestOutput]:
    """All prompts at once; their last outputs, in the order of the prompts."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    return last_outputs(engine)


def last_outputs(engine: OmniLLMEngine) -> list[RequestOutput]:
    """Steps until no request is left; the last outputs of all, in the order of their ids, which are numbers."""
    finished = {output.request_id: output for output in step_until_idle(engine) if output.finished}
    return [finished[req_id] for req_id in sorted(finished, key=int)]


def runner_of(engine: OmniLLMEngine) -> Any:
    """Its model runner."""
    return engine.model_executor.driver_worker.model_runner  # type: ignore[attr-defined]


def finish(engine: OmniLLMEngine) -> dict[str, list[RequestOutput]]:
    """The outputs of all requests, by id, in order; one step raises on the way, and loses nothing."""
    outputs: dict[str, list[RequestOutput]] = defaultdict(list)
    num_raised = 0
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                outputs[output.request_id].append(output)
        except Broken:
            num_raised += 1
            assert engine.recover() == []
    assert num_raised == 1
    return outputs
