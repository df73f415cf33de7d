# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights float16 holds are packed and compute the same; all others are left to vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CompilationMode
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_omni.worker.cpu_half_weights import (
    CPUHalfWeights,
    HalfEmbeddingMethod,
    HalfLinearMethod,
    HalfWeightsConfig,
    can_pack,
)
from vllm_omni.worker.cpu_worker import CPUARModelRunner, CPUFeedbackARModelRunner, CPUGenerationModelRunner
from vllm_omni.worker.half_table import HalfTable

pytestmark = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="FBGEMM is not there for this processor"
)


def make_layer(dtype: torch.dtype, scale: float = 0.02) -> nn.Module:
    """A layer `[48, 32]` whose checkpoint is in `dtype`."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=False)
    layer.weight = nn.Parameter((torch.randn(48, 32) * scale).to(dtype).float(), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("dtype", "scale", "is_packed"),
    [
        (torch.float16, 0.02, True),
        (torch.bfloat16, 0.02, True),
        (torch.bfloat16, 1e-5, True),  # Values that float16 holds with fewer bits.
        (torch.bfloat16, 1e6, False),
        (torch.float32, 0.02, False),
    ],
)
def test_only_the_same_numbers_are_packed(dtype: torch.dtype, scale: float, is_packed: bool) -> None:
    assert can_pack(make_layer(dtype, scale)) == is_packed


def test_other_layers_are_not_packed() -> None:
    layer = make_layer(torch.float16)
    layer._cpu_skip_gemm_dispatch = True
    assert not can_pack(layer)
    assert not can_pack(make_layer(torch.float16).half())
    layer = make_layer(torch.float16)
    layer.weight[3, 4] = torch.inf
    assert not can_pack(layer)


@pytest.mark.parametrize("method", [HalfLinearMethod, HalfEmbeddingMethod])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 32), (7, 32), (2, 3, 32), (0, 32)])
@torch.inference_mode()
def test_products_are_those_of_float32(method: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layer, x, bias = make_layer(dtype), torch.randn(shape), torch.randn(48)
    expected = nn.functional.linear(x, layer.weight)
    embedding = layer.weight[3].clone()

    (half := method()).process_weights_after_loading(layer)

    if (len(shape) == 2 and shape[0]) or dtype == torch.bfloat16:  # vLLM's own takes rows.
        torch.testing.assert_close(half.apply(layer, x), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(half.apply(layer, x, bias), expected + bias, rtol=1e-5, atol=1e-6)
    if method is HalfEmbeddingMethod:
        assert half.embedding(layer, torch.tensor([3])).equal(embedding[None])
    else:
        assert layer.weight.numel() == 0


@pytest.mark.parametrize("is_head_first", [False, True])
def test_a_head_that_shares_its_weights_is_packed_once(monkeypatch: pytest.MonkeyPatch, is_head_first: bool) -> None:
    count = 0

    def prepack(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        nonlocal count
        count += 1
        return original(weight, bias)

    original = torch.ops.quantized.linear_prepack_fp16
    monkeypatch.setattr(torch.ops.quantized, "linear_prepack_fp16", prepack)
    embedding, head = make_layer(torch.float16), ParallelLMHead.__new__(ParallelLMHead)
    nn.Module.__init__(head)
    head.weight = embedding.weight
    x, expected = torch.randn(2, 32), []
    for layer in (head, embedding) if is_head_first else (embedding, head):
        HalfEmbeddingMethod().process_weights_after_loading(layer)
        assert count == int(layer is head or is_head_first)  # That of the head does not wait for a request.
        expected.append(nn.functional.linear(x, layer.weight))

    for layer in (embedding, head):
        torch.testing.assert_close(HalfEmbeddingMethod().apply(layer, x), expected[0], rtol=1e-5, atol=1e-6)
    assert count == 1


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE])
@pytest.mark.parametrize("has_head", [False, True])
@torch.inference_mode()
def test_embeddings_take_half_of_their_memory(
    monkeypatch: pytest.MonkeyPatch, has_head: bool, mode: CompilationMode
) -> None:
    """Of a model that is not compiled; an embedding alone is packed by its first product."""
    embedding, head = make_layer(torch.float16), ParallelLMHead.__new__(ParallelLMHead)
    nn.Module.__init__(head)
    head.weight = embedding.weight
    layers = [embedding, head] if has_head else [embedding]
    x, ids, rows = torch.randn(2, 32), torch.tensor([3, 47]), embedding.weight[[3, 47]].clone()
    expected = nn.functional.linear(x, embedding.weight)
    runner = CPUHalfWeights.__new__(CPUHalfWeights)

    def load(self: Any) -> None:
        self.model = nn.ModuleList(layers)
        for layer in layers:
            HalfEmbeddingMethod().process_weights_after_loading(layer)

    monkeypatch.setattr(CPUModelRunner, "load_model", load)
    model_config, compilation_config = SimpleNamespace(dtype=torch.float32), SimpleNamespace(mode=mode)
    runner.vllm_config = SimpleNamespace(
        model_config=model_config, compilation_config=compilation_config, quant_config=None
    )
    runner.load_model()

    for layer in layers:
        assert isinstance(layer.weight, HalfTable) == (mode == CompilationMode.NONE)
        assert HalfEmbeddingMethod().embedding(layer, ids).equal(rows)
        torch.testing.assert_close(HalfEmbeddingMethod().apply(layer, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "mode", "quantization", "is_used"),
    [
        (torch.float32, CompilationMode.NONE, None, True),
        (torch.bfloat16, CompilationMode.NONE, None, False),
        (torch.float32, CompilationMode.DYNAMO_TRACE_ONCE, None, False),
        (torch.float32, CompilationMode.NONE, "the user's", False),
    ],
)
def test_a_model_in_float32_that_is_not_compiled_uses_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, mode: CompilationMode, quantization: Any, is_used: bool
) -> None:
    monkeypatch.setattr(CPUModelRunner, "load_model", lambda self: None)
    runner = CPUHalfWeights.__new__(CPUHalfWeights)
    runner.model = nn.Module()
    runner.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        compilation_config=SimpleNamespace(mode=mode),
        quant_config=quantization,
    )

    runner.load_model()

    assert isinstance(runner.vllm_config.quant_config, HalfWeightsConfig) == is_used


@pytest.mark.parametrize("runner", [CPUARModelRunner, CPUFeedbackARModelRunner, CPUGenerationModelRunner])
def test_all_runners_have_it(runner: type) -> None:
    assert issubclass(runner, CPUHalfWeights)
