# SPDX-License-Identifier: Apache-2.0
"""A diffusion stage's engine in the test's own thread, and what becomes of its requests."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.stage.running_engine import StepCounter
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.inputs import StageRequest
from vllm_omni.sampling_params import DiffusionRequest, DiffusionSamplingParams
from vllm_omni.stage.engines.base import NewRequest, Outbox, OutboxItem, Result, Stream
from vllm_omni.stage.engines.diffusion import DiffusionStageEngine

NUM_STEPS = 4
SHORT = {"height": 32, "width": 32, "num_inference_steps": NUM_STEPS, "output_format": "np"}


class WatchedEngine:
    """An engine that runs in the test's thread, so that an item is processed before the next step."""

    def __init__(self, checkpoint: Path, max_batch_size: int, **settings: Any) -> None:
        self.outbox = WatchedOutbox()
        config = DiTConfig(max_batch_size=max_batch_size, **settings)
        self.engine = DiffusionStageEngine(self.outbox, 0, str(checkpoint), config, memory=None)
        self.engine.start()

    def run(
        self,
        *requests: NewRequest,
        on_item: Callable[[OutboxItem], None] = lambda item: None,
        on_step: Callable[[int], None] = lambda num_steps: None,
    ) -> list[int]:
        """Works until `engine.stop` is called; returns the number of outputs in each step."""
        self.outbox.items.clear()
        self.outbox.order.clear()
        self.outbox.on_item = on_item
        self.engine.recorder = counter = WatchedCounter(on_step)
        for request in requests:
            self.engine.inbox.put(request)
        self.engine.run()
        return counter.batch_sizes

    def run_to_the_end(self, *requests: NewRequest) -> list[int]:
        """Works until all of these are done."""
        return self.run(*requests, on_item=self.stop_after(len(requests)))

    def stop_after(self, num_ends: int) -> Callable[[OutboxItem], None]:
        def on_item(item: OutboxItem) -> None:
            if sum(not isinstance(items[-1], Stream) for items in list(self.outbox.items.values())) == num_ends:
                self.engine.stop()

        return on_item

    def steps(self, request_id: str) -> list[tuple[int, int]]:
        """The steps of each output, as a streaming client gets them."""
        outputs = [item.output for item in self.outbox.items[request_id] if isinstance(item, Stream)]
        return [(output.data["index"], output.step) for output in outputs]

    def tensors(self, request_id: str) -> dict[str, torch.Tensor]:
        """What was made."""
        last = self.outbox.items[request_id][-1]
        assert isinstance(last, Result), last
        return last.output.tensors


class WatchedOutbox(Outbox):
    def __init__(self) -> None:
        super().__init__()
        self.items: dict[str, list[OutboxItem]] = defaultdict(list)
        self.order: list[str] = []
        self.on_item: Callable[[OutboxItem], None]

    def put(self, item: OutboxItem) -> None:
        self.items[item.request_id].append(item)
        self.order.append(item.request_id)
        self.on_item(item)


class WatchedCounter(StepCounter):
    def __init__(self, on_step: Callable[[int], None]) -> None:
        super().__init__()
        self._on_step = on_step

    def step(self, seconds: float, batch_size: int) -> None:
        super().step(seconds, batch_size)
        self._on_step(len(self.batch_sizes))


def new_request(request_id: str, *seeds: int, **settings: Any) -> NewRequest:
    """One image for each seed."""
    params = DiffusionSamplingParams(**(SHORT | settings), num_outputs_per_prompt=len(seeds))
    diffusion = DiffusionRequest(params=params, seeds=list(seeds))
    return NewRequest(StageRequest(request_id=request_id, prompt="a hen", diffusion=diffusion), streams_output=True)
