# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's stages against transformers, on windows and through all three."""

from tests.model_executor.models.omni import PipelineTests


class TestPipeline(PipelineTests):
    pass
