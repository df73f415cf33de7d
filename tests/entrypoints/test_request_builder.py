# SPDX-License-Identifier: Apache-2.0
"""Requests as their builder makes them for the stages."""

from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, SamplingType

from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.entrypoints.request_builder import RequestBuilder


def make_builder(model: Path, max_restarts: int = 5) -> RequestBuilder:
    stage = {"stage_id": 0, "engine_args": {"max_model_len": 128}, "final_output": True, "final_output_type": "text"}
    raw = {"stage_args": [stage], "runtime": {"restart": {"max_restarts": max_restarts}}}
    return RequestBuilder(parse_pipeline_config(raw, "this test"), str(model))


@pytest.fixture(scope="module")
def builder(tiny_qwen3: Path) -> RequestBuilder:
    return make_builder(tiny_qwen3)


def params_of(builder: RequestBuilder, params: Any = None, streams: bool = True) -> SamplingParams:
    request = builder.build({"prompt": "hello"}, params, lambda event: None, streams=streams).stages[0]
    assert request.engine_request is not None and request.sampling_params is not None
    assert request.engine_request.sampling_params.seed == request.sampling_params.seed
    return request.engine_request.sampling_params


def test_each_stream_that_samples_gets_a_seed(builder: RequestBuilder) -> None:
    given = SamplingParams(temperature=0.7)
    assert given.sampling_type is SamplingType.RANDOM  # It keeps this.
    seeded = params_of(builder, given)
    assert (seeded.temperature, seeded.sampling_type) == (0.7, SamplingType.RANDOM_SEED)
    assert len({params_of(builder).seed for _ in range(8)}) == 8
    assert given.seed is None and params_of(builder, streams=False).seed is None


@pytest.mark.parametrize(("given", "seed"), [({"temperature": 0.0}, None), ({"seed": 7}, 7)])
def test_others_stay_as_they_are(builder: RequestBuilder, given: dict[str, Any], seed: int | None) -> None:
    assert params_of(builder, given).seed == seed


def test_no_seed_where_nothing_restarts(tiny_qwen3: Path) -> None:
    assert params_of(make_builder(tiny_qwen3, max_restarts=0)).seed is None
