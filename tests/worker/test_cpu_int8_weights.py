# SPDX-License-Identifier: Apache-2.0
"""`quantization: int8`: products of linear layers are those of the rounded weights, and what cannot have it says so."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CompilationMode
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_omni.engine import engine_args
from vllm_omni.engine.engine_args import Int8Weights, OmniEngineSettings, create_engine_args
from vllm_omni.errors import StageConfigError
from vllm_omni.worker import cpu_int8_weights
from vllm_omni.worker.cpu_graphs import Recorder, capture
from vllm_omni.worker.cpu_half_weights import HalfEmbeddingMethod
from vllm_omni.worker.cpu_int8_weights import (
    CPUInt8Weights,
    Int8HeadMethod,
    Int8LinearMethod,
    Int8WeightsConfig,
    TwoTermProduct,
    quantize,
)

needs_vnni = pytest.mark.skipif(not cpu_int8_weights.HAS_INT8_PRODUCTS, reason="the processor has no products of int8")


def make_layer(num_outputs: int = 64, num_inputs: int = 96) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(num_inputs, num_outputs, bias=False)
    layer.weight = nn.Parameter(torch.randn(num_outputs, num_inputs) * 0.02, requires_grad=False)
    return layer


def test_the_nearest_product_is_kept() -> None:
    weight = torch.tensor([[0.5, -1.0, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]])
    rounded, scales = quantize(weight)
    assert rounded.dtype == torch.int8 and rounded.tolist() == [[64, -127, 32, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(rounded * scales.float()[:, None], weight, atol=0.5 / 127, rtol=0)


@pytest.fixture(params=[False, pytest.param(True, marks=needs_vnni)], ids=["bfloat16", "two terms"])
def has_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cpu_int8_weights, "HAS_INT8_PRODUCTS", request.param)
    return request.param


@pytest.mark.usefixtures("has_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 96), (7, 96), (2, 3, 96), (0, 96), (100, 96)])
@torch.inference_mode()
def test_products_are_those_of_the_rounded_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layer, x, bias = make_layer(), torch.randn(shape).to(dtype), torch.randn(64).to(dtype)
    rounded, scales = quantize(layer.weight)
    expected = nn.functional.linear(x.to(torch.bfloat16).float(), rounded * scales.float()[:, None])

    (method := Int8LinearMethod()).process_weights_after_loading(layer)

    assert layer.weight.numel() == 0
    product = method.apply(layer, x)
    assert product.dtype == dtype
    torch.testing.assert_close(product.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(method.apply(layer, x, bias).float(), expected + bias.float(), rtol=2e-2, atol=2e-2)


@needs_vnni
@torch.inference_mode()
def test_two_terms_keep_15_bits_of_a_row_whatever_the_others_are() -> None:
    layer = make_layer()
    rows = torch.randn(9, 96) * torch.logspace(-20, 20, 9)[:, None]
    rows[3, 5] *= 1000.0
    rows[4] = 0.0
    rounded, scales = quantize(layer.weight)
    expected = nn.functional.linear(rows.double(), rounded * scales.double()[:, None])
    product = TwoTermProduct(rounded, scales)

    result = product(rows)

    bound = rows.abs().amax(dim=1, keepdim=True) * (rounded * scales.float()[:, None]).abs().sum(dim=1)
    assert ((result - expected).abs() <= bound * 2.0**-15).all()
    assert torch.equal(result, torch.cat([product(row) for row in rows.split(1)]))


@needs_vnni
@torch.inference_mode()
def test_a_captured_product_makes_its_result_alone() -> None:
    product, x, other = TwoTermProduct(*quantize(make_layer(160).weight)), torch.randn(1, 96), torch.randn(1, 96)
    with (recorder := Recorder()):
        product(x)
    assert not [call for call in recorder.calls if call.operation is torch.ops.aten.empty.memory_format]
    replay, result = capture(lambda: product(x), [x])
    assert torch.equal(result, product(x))
    assert replay is not None and torch.equal(replay(other), product(other))


@pytest.mark.parametrize("is_loaded", [True, False])
@torch.inference_mode()
def test_heads(has_products: bool, is_loaded: bool) -> None:
    head = ParallelLMHead.__new__(ParallelLMHead)
    nn.Module.__init__(head)
    head.weight = make_layer().weight if is_loaded else nn.Parameter(torch.empty(64, 96, device="meta"))
    method = Int8WeightsConfig().get_quant_method(head, "lm_head")
    assert isinstance(method, Int8HeadMethod if has_products else HalfEmbeddingMethod)
    method.process_weights_after_loading(head)
    assert head.weight.shape == (64, 96)  # An embedding may have the same.
    if is_loaded:
        x = torch.randn(3, 96)
        torch.testing.assert_close(method.apply(head, x), x @ head.weight.t(), rtol=1e-2, atol=1e-2)


@torch.inference_mode()
def test_widths_that_the_kernel_has_not_stay_in_float(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, cpu_int8_weights.logger.name)
    monkeypatch.setattr(cpu_int8_weights.logger, "handlers", [caplog.handler])
    layer, x = make_layer(48), torch.randn(2, 96)
    expected = nn.functional.linear(x, layer.weight)
    method = Int8LinearMethod()
    method.prefix = "a.layer"
    method.process_weights_after_loading(layer)
    torch.testing.assert_close(method.apply(layer, x), expected)
    assert "a.layer [48, 96] stays in float" in caplog.text


def load(
    quantization: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, size: int = 64, chosen: Int8Weights = "int8"
) -> Any:
    loaded = make_layer(size)
    Int8LinearMethod().process_weights_after_loading(loaded)
    monkeypatch.setattr(CPUModelRunner, "load_model", lambda self: None)
    monkeypatch.setattr(OmniEngineSettings, "from_vllm_config", lambda config: OmniEngineSettings(int8_weights=chosen))
    runner: Any = CPUInt8Weights.__new__(CPUInt8Weights)
    model = SimpleNamespace(dtype=dtype, quantization="awq")
    runner.vllm_config = SimpleNamespace(
        model_config=model, quant_config=quantization, compilation_config=SimpleNamespace(mode=CompilationMode.NONE)
    )
    runner.model = loaded
    runner.load_model()
    return runner.vllm_config.quant_config


def test_the_runner_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load(None, torch.float32, monkeypatch), Int8WeightsConfig)
    with pytest.raises(StageConfigError, match="no layer of the model can have int8 weights"):
        load(None, torch.float32, monkeypatch, size=48)
    with pytest.raises(StageConfigError, match="quantization: the checkpoint has awq; remove int8"):
        load("the checkpoint's", torch.float32, monkeypatch)
    with pytest.raises(StageConfigError, match=r"int8 needs dtype float32 or bfloat16, not torch\.float16"):
        load(None, torch.float16, monkeypatch)


def test_what_cannot_have_it_stays_as_it_is_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load(None, torch.bfloat16, monkeypatch, chosen="auto"), Int8WeightsConfig)
    assert load("the checkpoint's", torch.float32, monkeypatch, chosen="auto") == "the checkpoint's"
    assert load(None, torch.float16, monkeypatch, chosen="auto") is None
    load(None, torch.float32, monkeypatch, size=48, chosen="auto")


def test_what_cannot_have_it_is_refused(monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path) -> None:
    model = str(tiny_qwen3)
    with pytest.raises(StageConfigError, match="int8 is not compiled; set enforce_eager: true"):
        create_engine_args(model, quantization="int8")
    args = create_engine_args(model, quantization="int8", enforce_eager=True)
    assert args.quantization is None and args.additional_config["omni"]["int8_weights"] == "int8"
    monkeypatch.setattr(engine_args, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with pytest.raises(StageConfigError, match="int8 is computed on a CPU"):
        create_engine_args(model, quantization="int8", enforce_eager=True)


@pytest.mark.parametrize("multiplies", [True, False])
def test_auto_is_int8_where_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path, multiplies: bool
) -> None:
    def chosen(**arguments: Any) -> str | None:
        args = create_engine_args(str(tiny_qwen3), quantization="auto", **arguments)
        assert args.quantization is None, "vLLM has none of this name"
        return OmniEngineSettings.from_vllm_config(args).int8_weights

    monkeypatch.setattr(engine_args, "HAS_INT8_PRODUCTS", multiplies)
    assert chosen(enforce_eager=True) == ("auto" if multiplies else None)
    assert chosen() is None, "a compiled model"
    monkeypatch.setattr(engine_args, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert chosen(enforce_eager=True) is None
