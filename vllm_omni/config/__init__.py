# SPDX-License-Identifier: Apache-2.0
"""Stage configuration: typed, frozen, loaded from YAML."""

from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig

__all__ = ["OmniStageConfig", "PipelineConfig", "load_pipeline_config"]
