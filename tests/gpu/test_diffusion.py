# SPDX-License-Identifier: Apache-2.0
"""Diffusers pipelines on a GPU: about what diffusers makes on the CPU in float32, alone and several at once."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.diffusion.test_parity import Request, made_by
from tests.diffusion.tiny_calls import SMALLEST
from vllm_omni import OmniLLM
from vllm_omni.testing.diffusers_oracle import DiffusersOracle

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.05}
"""Of pixels in [0, 1], on average."""
NAMES = ("stable_diffusion_3", "wan", "z_image")


class Painter(NamedTuple):
    llm: OmniLLM
    requests: list[Request]
    expected: list[np.ndarray]
    tolerance: float


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=TOLERANCE)
def painter(request: pytest.FixtureRequest, name: str, tiny_diffusion: Callable[[str], Path]) -> Iterator[Painter]:
    path = tiny_diffusion(name)
    requests = [
        Request(prompt, seed, SMALLEST[name], [])
        for seed, prompt in enumerate(("a red cat", "two ships", "the wind in a tree at night", "a house on a hill"))
    ]
    oracle = DiffusersOracle(path)
    expected = [oracle.generate(one.prompt, seed=one.seed, **one.call).numpy() for one in requests]
    with OmniLLM(str(path), dtype=request.param, batch_wait_ms=50) as llm:  # so that they do meet
        yield Painter(llm, requests, expected, TOLERANCE[request.param])


def test_one_request_is_near_diffusers(painter: Painter) -> None:
    (made,) = made_by(painter.llm, painter.requests[0])
    assert difference(made, painter.expected[0]) < painter.tolerance


def test_requests_at_once_are_near_diffusers(painter: Painter) -> None:
    with ThreadPoolExecutor(len(painter.requests)) as threads:
        made = list(threads.map(lambda request: made_by(painter.llm, request)[0], painter.requests))
    for one, other in zip(made, painter.expected, strict=True):
        assert difference(one, other) < painter.tolerance


def difference(made: np.ndarray, expected: np.ndarray) -> float:
    assert made.shape == expected.shape
    return float(np.abs(made.astype(np.float32) - expected).mean())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("name", "setting"), [("z_image", "data_parallel_size"), ("wan", "data_parallel_size"), ("wan", "ulysses_degree")]
)
def test_a_denoiser_on_two_gpus_is_near_diffusers(
    name: str, setting: str, tiny_diffusion: Callable[[str], Path]
) -> None:
    path = tiny_diffusion(name)
    requests = [Request(prompt, 1, SMALLEST[name], []) for prompt in ("a red cat", "two ships")]
    oracle = DiffusersOracle(path)
    llm = OmniLLM(str(path), dtype="float32", batch_wait_ms=50, **{setting: 2})
    with llm, ThreadPoolExecutor(len(requests)) as threads:
        made = list(threads.map(lambda request: made_by(llm, request)[0], requests))
    for one, request in zip(made, requests, strict=True):
        expected = oracle.generate(request.prompt, seed=1, **request.call).numpy()
        assert difference(one, expected) < TOLERANCE["float32"]
