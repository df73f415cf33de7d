# SPDX-License-Identifier: Apache-2.0
"""Running requests through an engine, as tests want it."""

import torch
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from vllm_omni.engine.omni_llm_engine import OmniLLMEngine

MAX_STEPS = 2000


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
        outputs += engine.step()
    raise AssertionError(f"requests are left after {MAX_STEPS} steps")


def run(engine: OmniLLMEngine, prompts: list[dict], params: SamplingParams) -> list[RequestOutput]:
    """All prompts at once; their last outputs, in the order of the prompts."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    finished = {output.request_id: output for output in step_until_idle(engine) if output.finished}
    return [finished[str(index)] for index in range(len(prompts))]
