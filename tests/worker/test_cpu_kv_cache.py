# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a stage on a CPU is zero, and takes memory where it was written to."""

from typing import Any

import pytest
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_omni.metrics.memory import resident_bytes
from vllm_omni.worker.cpu_worker import (
    CPUARModelRunner,
    CPUFeedbackARModelRunner,
    CPUGenerationModelRunner,
    CPUKVCache,
    UnwrittenZeros,
)

MIB = 1 << 20
CPU = torch.device("cpu")


def test_memory_is_taken_by_the_first_write() -> None:
    before = resident_bytes()
    with UnwrittenZeros():
        cache = torch.zeros(256 * MIB, dtype=torch.int8, device=CPU)
    blocks = cache.view(torch.float32).view(256, -1)
    assert resident_bytes() - before < 32 * MIB
    assert cache.data_ptr() % 4096 == 0
    assert not blocks[100].any()
    blocks[7] = 1.0
    assert blocks[6:9].sum(dim=1).tolist() == [0.0, blocks.shape[1], 0.0]
    assert resident_bytes() - before < 64 * MIB


def test_the_memory_lives_as_long_as_a_view_of_it() -> None:
    with UnwrittenZeros():
        view = torch.zeros(MIB, dtype=torch.int8, device=CPU)[5:10]
    torch.zeros(MIB, dtype=torch.int8)  # would take its place
    assert view.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((3, 4), {"dtype": torch.int8, "device": CPU}),
        ((0,), {"dtype": torch.int8, "device": CPU}),
        ((16,), {"dtype": torch.float32, "device": CPU}),
        ((16,), {"dtype": torch.int8, "device": "meta"}),
        ((16,), {"dtype": torch.int8}),
        ((16,), {"dtype": torch.int8, "device": CPU, "requires_grad": False}),
    ],
)
def test_all_other_tensors_are_torchs(args: Any, kwargs: Any) -> None:
    expected = torch.zeros(*args, **kwargs)
    with UnwrittenZeros():
        found = torch.zeros(*args, **kwargs)
        assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
        assert torch.ones(4, dtype=torch.int8).tolist() == [1] * 4


def test_vllm_allocates_in_one_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `UnwrittenZeros` depends on: with another call the cache would be filled again, without a word."""
    assert {"zeros", "int8"} <= set(allocate_kv_cache.__code__.co_names)
    monkeypatch.setattr(
        CPUModelRunner,
        "initialize_kv_cache_tensors",
        lambda self, size: {"layer": torch.zeros(size, dtype=torch.int8, device=CPU)},
    )
    before = resident_bytes()
    runner = CPUKVCache.__new__(CPUKVCache)
    caches = runner.initialize_kv_cache_tensors(256 * MIB)
    assert caches["layer"].numel() == 256 * MIB
    assert resident_bytes() - before < 32 * MIB


@pytest.mark.parametrize("runner", [CPUARModelRunner, CPUFeedbackARModelRunner, CPUGenerationModelRunner])
def test_all_runners_have_it(runner: type) -> None:
    assert issubclass(runner, CPUKVCache)
