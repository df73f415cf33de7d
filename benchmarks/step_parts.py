# SPDX-License-Identifier: Apache-2.0
"""Where the time of an engine's step goes: stopwatches around methods of the running engine, in this process.

Each part has its time without the parts inside it, so that they add up to the step. Knows no model.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from report import mean

from vllm_omni.engine.omni_llm_engine import OmniLLMEngine

STEP = "all else in the step"


class StepClock:
    """Takes a running engine's steps apart. On a GPU it waits for the device wherever a part begins or ends."""

    def __init__(self, engine: OmniLLMEngine) -> None:
        self._sync: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self._inside: list[float] = []  # of each part that is open, the seconds of the parts inside it
        self._parts: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []
        worker: Any = engine.model_executor.driver_worker
        runner, scheduler = worker.model_runner, engine.engine_core.engine_core.scheduler
        model = runner.get_model()
        self._wrap(scheduler, "schedule", "schedule")
        self._wrap(runner, "execute_model", "prepare the step (host)")
        self._wrap(runner.strategy, "prompt_rows", "feed back: embeddings and text")
        self._wrap(runner.strategy, "feed_back", "feed back: embeddings and text")
        if hasattr(model, "code_predictor"):
            self._wrap(model.code_predictor, "forward", "feed back: code predictor")
        self._wrap(runner, "_model_forward", "backbone")
        self._wrap(model, "compute_logits", "logits")
        self._wrap(runner, "_sample", "sampling")
        self._wrap(runner, "sample_tokens", "tokens and rows out")
        self._wrap(scheduler, "update_from_output", "update the scheduler")
        self._wrap(engine.output_processor, "process_outputs", "output processing")
        self._step = self._timed(engine.step, STEP)

    def step(self) -> list[Any]:
        """The engine's, and one entry more in `steps`: seconds by part."""
        self._parts = defaultdict(float)
        outputs = self._step()
        self.steps.append(dict(self._parts))
        return outputs

    def quick_half(self) -> dict[str, float]:
        """Mean seconds of each part over the quicker half of the steps: other work on the machine hits the rest."""
        steps = sorted(self.steps, key=lambda step: sum(step.values()))[: (len(self.steps) + 1) // 2]
        return {part: mean(step.get(part, 0.0) for step in steps) for part in _in_order(steps)}

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        # On the object, whose class stays as it is; `nn.Module.__call__` finds a `forward` there, too.
        object.__setattr__(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            self._sync()
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._sync()
                seconds = time.perf_counter() - started
                self._parts[part] += seconds - self._inside.pop()
                if self._inside:
                    self._inside[-1] += seconds

        return timed


def _in_order(steps: list[dict[str, float]]) -> list[str]:
    """All parts, as they end in a step; the step itself last."""
    return sorted({part: None for step in steps for part in step}, key=lambda part: part == STEP)
