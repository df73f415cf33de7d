# SPDX-License-Identifier: Apache-2.0
"""A pipeline of two stages, and the summary of a request."""

import pytest

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.metrics.observer import RequestSummary
from vllm_omni.metrics.stats import StageMetrics


@pytest.fixture
def config() -> PipelineConfig:
    """A thinker that outputs text, and a talker that reads it and outputs audio."""
    thinker = OmniStageConfig(
        stage_id=0, engine_args={"model_stage": "thinker"}, final_output=True, final_output_type="text"
    )
    talker = OmniStageConfig(
        stage_id=3,
        engine_args={"model_stage": "talker"},
        engine_input_source=[0],
        final_output=True,
        final_output_type="audio",
    )
    return PipelineConfig(stage_args=[thinker, talker])


@pytest.fixture
def summarize():
    """Makes the summary of a request that takes ten seconds from `arrival` on; `fields` replace others."""

    def summary(request_id: str = "7", arrival: float = 1000.0, **fields) -> RequestSummary:
        thinker = StageMetrics(
            stage_id=0,
            name="thinker",
            arrival=arrival,
            started=arrival + 1,
            first_output=arrival + 2,
            finished=arrival + 6,
            num_input_tokens=12,
            num_output_tokens=5,
            num_chunks=3,
        )
        talker = StageMetrics(stage_id=3, name="talker", arrival=arrival + 3, started=arrival + 3, finished=arrival + 9)
        values = {
            "ended": arrival + 10,
            "stages": [thinker, talker],
            "first_text": arrival + 2.5,
            "first_audio": arrival + 4,
            "num_text_tokens": 5,
            "audio_seconds": 20.0,
            "text_stage_id": 0,
        }
        return RequestSummary(request_id=request_id, arrival=arrival, **(values | fields))

    return summary
