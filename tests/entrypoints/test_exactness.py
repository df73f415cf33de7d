# SPDX-License-Identifier: Apache-2.0
"""A small run of `benchmarks/exactness.py`: random requests in a crowd get what each of them gets alone."""

import importlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.testing.hf_oracle import HFOracle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exactness() -> Iterator[Any]:
    """The script, imported as it is run: with its own folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("exactness")


@pytest.mark.parametrize(
    "name, llm, checkpoint",
    [
        ("qwen2_5_omni", "qwen2_5_async_llm", "tiny_qwen2_5_omni"),
        ("qwen3_omni_moe", "talking_async_llm", "tiny_qwen3_omni_moe"),
    ],
)
def test_a_crowd_gets_what_each_gets_alone(
    name: str, llm: str, checkpoint: str, exactness: Any, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(checkpoint)
    modalities = (None, ("text",), ("audio",), ("text", "audio"))  # as they ship, talkers keep their codes
    model = replace(exactness.MODELS[name], talker_tokens=30, modalities=modalities)
    service = exactness.Service(model, path, request.getfixturevalue(llm), HFOracle(path, num_threads=1))

    findings, rng = exactness.Findings(name), random.Random(4)
    while findings.alone < 8 or not findings.reference:
        exactness.run_round(service, rng, findings)

    assert findings.differences == []
    assert findings.tokens > 0
