# SPDX-License-Identifier: Apache-2.0
"""A model with `quantization: int8` computes what HF transformers computes with the same rounded weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.linear import LinearBase

from tests.engine.running import greedy, random_prompts, run, runner_of
from vllm_omni.engine.engine_args import HAS_INT8_PRODUCTS
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.worker.cpu_int8_weights import quantize


@pytest.fixture(scope="module")
def int8_engine(start_engine: Callable[..., OmniLLMEngine], tiny_qwen3: Path) -> OmniLLMEngine:
    return start_engine(tiny_qwen3, quantization="int8", engine_output_type="latent")


def test_no_linear_layer_has_floats(int8_engine: OmniLLMEngine) -> None:
    layers = [layer for layer in runner_of(int8_engine).model.modules() if isinstance(layer, LinearBase)]
    assert layers and all(layer.has_int8_weights and not layer.weight.numel() for layer in layers)


@pytest.mark.parametrize("length", [20, 100])  # of few and of many rows
def test_hidden_states_are_those_of_the_rounded_weights(
    int8_engine: OmniLLMEngine, tiny_qwen3: Path, length: int
) -> None:
    hf = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    for layer in hf.model.modules():
        if isinstance(layer, nn.Linear):
            rounded, scales = quantize(layer.weight.detach())
            layer.weight.data = rounded * scales.float()[:, None]
    (prompt,) = random_prompts(length)
    with torch.inference_mode():
        expected = hf.model(torch.tensor([prompt])).last_hidden_state[0]

    (output,) = run(int8_engine, [{"prompt_token_ids": prompt}], greedy(1))

    hidden = output.multimodal_output["hidden"][:length]
    in_bfloat16 = 2e-2 if length < 48 else 1e-4
    tolerance = 5e-4 if HAS_INT8_PRODUCTS else in_bfloat16  # Of activations with 15 bits.
    assert torch.linalg.norm(hidden - expected) <= tolerance * torch.linalg.norm(expected)
