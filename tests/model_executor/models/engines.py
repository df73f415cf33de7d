# SPDX-License-Identifier: Apache-2.0
"""Small engines of single stages in this process, and how tests of models run them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.distributed import parallel_state
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.plugin import register

TIGHT = {"block_size": 32, "num_gpu_blocks_override": 12, "max_model_len": 256, "max_num_batched_tokens": 72}


def start_engine(model: Path, **engine_args: Any) -> OmniLLMEngine:
    register()
    make_expert_group()
    defaults = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20, "enforce_eager": True}
    args = create_engine_args(str(model), **(defaults | engine_args))
    return OmniLLMEngine.from_omni_engine_args(args)


def make_expert_group() -> None:
    """The first engine of a process creates vLLM's groups, without the expert group if it has no experts."""
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        parallel_state._EP = parallel_state.init_model_parallel_group([[0]], 0, "gloo", group_name="ep")


def run_engine(
    engine: OmniLLMEngine, prompts: dict[str, Any], params: SamplingParams | dict[str, SamplingParams]
) -> dict[str, RequestOutput]:
    """Runs all prompts as one batch; the last output of each request."""
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params[request_id] if isinstance(params, dict) else params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}  # type: ignore[misc]
    assert set(outputs) == set(prompts)
    return outputs


class PreemptionCounter:
    """Counts how often a scheduler takes a running request's memory away."""

    def __init__(self, engine: OmniLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        scheduler = engine._core.scheduler
        preempt = scheduler._preempt_request
        self.count = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return preempt(*args, **kwargs)

        monkeypatch.setattr(scheduler, "_preempt_request", counted)


def read_weights(checkpoint: Path, prefix: str) -> dict[str, torch.Tensor]:
    """A checkpoint's weights with this prefix."""
    weights = [item for file in checkpoint.glob("*.safetensors") for item in load_file(file).items()]
    return {name: tensor for name, tensor in weights if name.startswith(prefix)}
