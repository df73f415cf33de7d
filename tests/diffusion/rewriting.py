# SPDX-License-Identifier: Apache-2.0
"""What stands between a stage that rewrites prompts and the one that paints: an example, and what tests run."""

from collections.abc import Mapping

from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput


class RewrittenPrompt(StageInputProcessor):
    """The painter is told what the writer has written."""

    reads = ("completions",)

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput:
        (written,) = sources.values()
        assert written.first_completion is not None
        return StageInput(prompt=written.first_completion.text)
