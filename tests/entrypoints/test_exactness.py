# SPDX-License-Identifier: Apache-2.0
"""Random concurrent requests get what each of them gets alone, and what HF transformers makes of it.

Prompts of all kinds, lengths, voices and modalities, greedy and sampled, at random times; some clients abort. Text and
codes must be equal, and waves within 1e-4.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.entrypoints.fake_pipelines import quick_servers
from tests.entrypoints.random_requests import (
    CODES,
    RandomRequest,
    Result,
    make_random_request,
    run_hf,
    send,
    send_concurrently,
)
from vllm_omni import AsyncOmniLLM
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.hf_oracle import HFOracle

MAX_CONCURRENCY = 8
MODALITIES = (None, ("text",), ("audio",), ("text", "audio"), ("audio", CODES))
MAX_TALKER_TOKENS = 60
"""The longest speech, in codes."""
SPREAD_S = 0.6
ONE_IN_REFERENCE = 3
"""Of the greedy requests, how many HF transformers repeats."""


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        top_k, top_p: The talker's, by its authors.
        streamed_wave_differs: From that of clients that do not stream, by design.
    """

    name: str
    checkpoint: str
    top_k: int
    top_p: float
    streamed_wave_differs: bool


MODELS = (
    Model("qwen2_5_omni", "tiny_qwen2_5_omni", 40, 0.8, streamed_wave_differs=True),
    Model("qwen3_omni_moe", "tiny_qwen3_omni_moe", 50, 1.0, streamed_wave_differs=False),
)


@dataclass
class Comparison:
    """A pipeline, its reference, and the comparisons so far."""

    model: Model
    checkpoint: Path
    llm: AsyncOmniLLM
    num_alone: int = 0
    num_reference: int = 0
    num_tokens: int = 0
    differences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._oracle = HFOracle(self.checkpoint, num_threads=1)

    def run_until(self, num_alone: int, seed: int) -> None:
        """Rounds of concurrent requests, each of which is sent again alone; some are put to the reference."""
        rng = random.Random(seed)
        while self.num_alone < num_alone or not self.num_reference:
            self._run_round(rng)

    def _run_round(self, rng: random.Random) -> None:
        requests = [
            make_random_request(rng, MAX_TALKER_TOKENS, SPREAD_S, MODALITIES)
            for _ in range(rng.randint(2, MAX_CONCURRENCY))
        ]
        sent = [(request, request.prompt(self.checkpoint), self._params(request)) for request in requests]
        results = asyncio.run(send_concurrently(self.llm, sent))
        for request, result in zip(requests, results, strict=True):
            if result is None:
                continue
            self.num_alone += 1
            self.num_tokens += len(result.text or []) + len(result.codes or [])
            self._compare(request, result, self._send_alone(request), "concurrent and alone")
            if request.seed is None and rng.randrange(ONE_IN_REFERENCE) == 0:
                self._compare_to_reference(request, result)

    def _compare_to_reference(self, request: RandomRequest, result: Result) -> None:
        expected = run_hf(self._oracle, request.prompt(self.checkpoint), request)
        self.num_reference += 1
        if request.stream and self.model.streamed_wave_differs and result.audio is not None:
            self._compare(request, replace(result, audio=None), expected, "streamed and HF")
            request = replace(request, stream=False)
            result = self._send_alone(request)
        self._compare(request, result, expected, "ours and HF")

    def _send_alone(self, request: RandomRequest) -> Result:
        prompt = request.prompt(self.checkpoint)
        result = asyncio.run(send(self.llm, prompt, self._params(request), replace(request, aborts=False)))
        assert result is not None
        return result

    def _params(self, request: RandomRequest) -> list[Any]:
        return request.sampling_params(self.model.top_k, self.model.top_p)

    def _compare(self, request: RandomRequest, result: Result, other: Result, which: str) -> None:
        difference = result.difference_to(other)
        if difference is not None:
            self.differences.append(f"{which}: {difference}: {request}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_many_requests_with_the_codes_as_an_output(
    model: Model, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """As its stage configuration has it, windows included, with the talker's codes as one more output."""
    config = yaml.safe_load((stage_configs_dir() / f"{model.name}.yaml").read_text())
    config["stage_args"][1] |= {"final_output": True, "final_output_type": CODES}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(config))
    checkpoint = request.getfixturevalue(model.checkpoint)
    limits = {"max_model_len": 1024, "max_num_seqs": MAX_CONCURRENCY, "kv_cache_memory_bytes": 64 << 20}
    with quick_servers(), AsyncOmniLLM(str(checkpoint), str(file), dtype="float32", **limits) as llm:
        comparison = Comparison(model, checkpoint, llm)
        comparison.run_until(12, seed=0)
    assert comparison.differences == []
    assert comparison.num_tokens > 0


def test_a_seed_decides_the_requests_and_lengths_fit() -> None:
    first, again = (
        [make_random_request(rng, max_talker_tokens=40, spread_s=1.0, modalities=MODALITIES) for _ in range(200)]
        for rng in (random.Random(1), random.Random(1))
    )

    assert again == first
    for request in first:
        for shortest, longest in (request.text_tokens, request.talker_tokens):
            assert 0 <= shortest <= longest <= 40 and longest >= 1
    assert {request.modalities for request in first} == set(MODALITIES)
    for name in ("stream", "aborts"):
        assert {getattr(request, name) for request in first} == {True, False}


@pytest.mark.parametrize(
    "change, difference",
    [
        (lambda fields: fields | {"text": [1, 2, 4]}, "text: "),
        (lambda fields: fields | {"codes": [7]}, "codes: "),
        (lambda fields: fields | {"audio": fields["audio"][:-1]}, "waves of 4 and 3 samples"),
        (lambda fields: fields | {"audio": fields["audio"] + 2e-4}, "differ by 0.0002"),
        (lambda fields: fields | {"audio": torch.full((4,), torch.nan)}, "differ by nan"),
        (lambda fields: fields | {"audio": fields["audio"] + 5e-5}, None),
        (lambda fields: fields | {"codes": None, "audio": None}, None),
    ],
)
def test_differences_are_found(change: Callable[[dict[str, Any]], dict[str, Any]], difference: str | None) -> None:
    fields: dict[str, Any] = {"text": [1, 2, 3], "codes": [7, 8], "audio": torch.zeros(4)}
    found = Result(**fields).difference_to(Result(**change(fields)))

    assert (found is None) if difference is None else (difference in found)
