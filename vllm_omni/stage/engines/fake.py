# SPDX-License-Identifier: Apache-2.0
"""A stage without a model, for testing pipelines: it computes in no time what can be checked by hand."""

import os
import signal
import time
from typing import Any

import torch

from vllm_omni.outputs import StageOutput
from vllm_omni.stage.engines.base import NewRequest, OneAtATimeEngine, Outbox
from vllm_omni.stage.engines.function import make_stage_output


class FakeStageEngine(OneAtATimeEngine):
    """Joins the texts of its sources (or takes the prompt) and appends its own name.

    What it does with a request is said by the request's options:
        `fake_seconds`: works this long; `fake_bytes`: adds a tensor `bytes` of this size;
        `fake_fail`, `fake_die`: name of the stage that raises, or whose process dies, on this request.
    """

    def __init__(self, outbox: Outbox, stage_id: int, name: str) -> None:
        super().__init__(outbox)
        self._stage_id = stage_id
        self._name = name

    def start(self) -> None:
        pass

    def compute(self, new_request: NewRequest) -> StageOutput:
        options = new_request.request.options
        time.sleep(options.get("fake_seconds", 0.0))
        if options.get("fake_fail") == self._name:
            raise RuntimeError(f"{self._name} was told to fail")
        if options.get("fake_die") == self._name:
            os.kill(os.getpid(), signal.SIGKILL)
        sources = [output.completions[0].text for _, output in sorted(new_request.sources.items())]
        text = "+".join(sources) or new_request.request.prompt or ""
        values: dict[str, Any] = {"text": f"{text}>{self._name}"}
        if num_bytes := options.get("fake_bytes"):
            values["bytes"] = torch.full((num_bytes,), self._stage_id, dtype=torch.uint8)
        return make_stage_output(new_request.request, self._stage_id, values)
