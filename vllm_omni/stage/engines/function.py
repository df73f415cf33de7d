# SPDX-License-Identifier: Apache-2.0
"""A stage that is a plain Python function."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_omni.config.loader import resolve_dotted_path
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.stage.engines.base import NewRequest, OneAtATimeEngine, Outbox

StageFunction = Callable[[StageRequest, Mapping[int, StageOutput]], dict[str, Any]]
"""`function(request, sources) -> {name: value}`: tensors, plain values, and `text` for a text output."""


class FunctionStageEngine(OneAtATimeEngine):
    """Calls the function for each request."""

    def __init__(self, outbox: Outbox, stage_id: int, function_path: str) -> None:
        super().__init__(outbox)
        self._stage_id = stage_id
        self._function_path = function_path
        self._function: StageFunction

    def start(self) -> None:
        self._function = resolve_dotted_path(self._function_path, "function")

    def compute(self, new_request: NewRequest) -> StageOutput:
        values = self._function(new_request.request, new_request.sources)
        if not isinstance(values, dict):
            raise TypeError(f"{self._function_path} must return a dict, not {type(values).__name__}")
        return make_stage_output(new_request.request, self._stage_id, values)


def make_stage_output(request: StageRequest, stage_id: int, values: dict[str, Any]) -> StageOutput:
    """Sorts a function's values into what a stage output carries."""
    text = values.get("text")
    return StageOutput(
        request_id=request.request_id,
        stage_id=stage_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        completions=[] if text is None else [Completion(text=text, finish_reason="stop")],
        tensors={name: value for name, value in values.items() if isinstance(value, torch.Tensor)},
        data={name: value for name, value in values.items() if name != "text" and not isinstance(value, torch.Tensor)},
    )
