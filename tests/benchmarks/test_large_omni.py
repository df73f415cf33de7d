# SPDX-License-Identifier: Apache-2.0
"""The size of the large Qwen3-Omni, and its whole measurement on a tiny one."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from vllm_omni.testing.tiny.qwen3_omni_moe import make_config
from vllm_omni.testing.tiny.tokenizer import make_tokenizer

pytestmark = pytest.mark.slow


ImportBenchmark = Callable[[str], ModuleType]


@pytest.fixture
def large_omni(import_benchmark: ImportBenchmark) -> ModuleType:
    return import_benchmark("large_omni")


@pytest.mark.parametrize(
    ("gpu_gib", "disk_gib", "layers", "experts"),
    [(4, 100, 16, 8), (15, 100, 30, 8), (139, 12, 24, 8), (139, 40, 48, 16)],
)
def test_the_model_fits(large_omni: ModuleType, gpu_gib: int, disk_gib: int, layers: int, experts: int) -> None:
    size = large_omni.fitting(gpu_gib, disk_gib)
    assert (size.layers, size.experts) == (layers, experts)
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(make_config(size, make_tokenizer()))
    gib = sum(parameter.numel() for parameter in model.parameters()) / 2**30
    assert 4 * gib < disk_gib and (layers == 16 or 2 * gib < gpu_gib * large_omni.SHARES["thinker"])


def test_it_runs_on_a_tiny_model(
    import_benchmark: ImportBenchmark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    arguments = ["--part", "large", "--tiny", "--quick", "--concurrency", "1", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["streaming.py", *arguments])
    import_benchmark("streaming").main()
    report = json.loads(output.read_text())
    assert [(row["backend"], row["clients"]) for row in report["rows"]] == [
        ("vllm_omni", 1), ("HF transformers", 1), ("vllm_omni", 2), ("HF transformers", 2)
    ]  # fmt: skip
    for ours, hf in zip(report["rows"][::2], report["rows"][1::2], strict=True):
        assert ours["sound s/s"] / ours["requests/s"] == pytest.approx(hf["sound s/s"] / hf["requests/s"], rel=0.02)
        assert ours["tokens/s"] / ours["requests/s"] == pytest.approx(40) and ours["TTFA p50 s"] > ours["TTFT p50 s"]
    assert set(report["ratios"]) == {
        f"{name}_c{clients}" for name in ("tokens_per_second", "sound_per_second", "first_sound_speedup")
        for clients in (1, 2)
    }  # fmt: skip
