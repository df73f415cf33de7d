# SPDX-License-Identifier: Apache-2.0
"""The stage input processor between a stage that rewrites prompts and one that makes images: an example for tests."""

from collections.abc import Mapping

from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput


class RewrittenPrompt(StageInputProcessor):
    """The rewriter's text becomes the prompt of the image stage."""

    reads = ("completions",)

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput:
        (rewritten,) = sources.values()
        assert rewritten.first_completion is not None
        return StageInput(prompt=rewritten.first_completion.text)
