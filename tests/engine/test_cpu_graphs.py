# SPDX-License-Identifier: Apache-2.0
"""An engine on a CPU writes the same with captured steps as with the model's own, and captures each size once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm.platforms import current_platform

from tests.engine.running import greedy, last_outputs, random_prompts, runner_of
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.worker.cpu_graphs import CPUGraphs

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU has graphs of its own")


@pytest.fixture(params=["text", "rows"])
def engine(request: pytest.FixtureRequest, text_engine: OmniLLMEngine, rows_engine: OmniLLMEngine) -> OmniLLMEngine:
    return {"text": text_engine, "rows": rows_engine}[request.param]


@pytest.fixture(scope="module")
def rows_engine(start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path) -> OmniLLMEngine:
    return start_engine(tiny_qwen3, engine_output_type="latent", async_scheduling=False)


@pytest.mark.parametrize("num_requests", [1, 2, 5])
def test_writes_the_same(engine: OmniLLMEngine, monkeypatch: pytest.MonkeyPatch, num_requests: int) -> None:
    """Requests of several lengths and blocks start together, and end one after the other."""
    runner, sizes = runner_of(engine), []
    prompts = random_prompts(*range(20, 20 + 17 * num_requests, 17), seed=num_requests)

    def write() -> list[tuple[list[int], torch.Tensor | None]]:
        engine.reset_prefix_cache()
        for index, prompt in enumerate(prompts):
            params = greedy(40 - 3 * index, repetition_penalty=1.1)
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        outputs = last_outputs(engine)
        return [(list(o.outputs[0].token_ids), o.multimodal_output.get("hidden")) for o in outputs]

    def forward(input_ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        sizes.append(len(input_ids))
        return type(runner.model).forward(runner.model, input_ids, *args, **kwargs)

    monkeypatch.setattr(runner.model, "forward", forward)
    with monkeypatch.context() as patch:
        patch.setattr(CPUGraphs, "_model_forward", super(CPUGraphs, runner)._model_forward.__func__)
        expected = write()
    assert len(sizes) == 40
    runner._graphs.clear()
    for num_captured in (num_requests, 0):
        sizes.clear()
        written = write()
        assert len(sizes) == 1 + num_captured  # That of the prompts is the model's own.
        for (tokens, rows), (expected_tokens, expected_rows) in zip(written, expected, strict=True):
            assert tokens == expected_tokens
            assert rows is expected_rows is None or torch.equal(rows, expected_rows)
