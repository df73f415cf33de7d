# SPDX-License-Identifier: Apache-2.0
"""Image-to-image requests that start and end at different times: none of them keeps a graph."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diffusion.watched_engine import SHORT, WatchedEngine
from vllm_omni.inputs import StageRequest
from vllm_omni.sampling_params import DiffusionRequest, DiffusionSamplingParams
from vllm_omni.stage.engines.base import NewRequest
from vllm_omni.worker import gpu_diffusion_worker


@pytest.fixture(scope="module")
def watched(tiny_diffusion: Callable[[str], Path]) -> Iterator[WatchedEngine]:
    watched = WatchedEngine(tiny_diffusion("z_image"), max_batch_size=3)
    yield watched
    watched.engine.close()


def change(request_id: str, num_inference_steps: int) -> NewRequest:
    """An image-to-image request."""
    params = DiffusionSamplingParams(**SHORT | {"num_inference_steps": num_inference_steps, "strength": 0.9})
    image = torch.randint(256, (32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    diffusion = DiffusionRequest(params=params, seeds=[7], images=[image])
    return NewRequest(StageRequest(request_id=request_id, prompt="a hen", diffusion=diffusion), streams_output=True)


def test_nothing_is_computed_with_gradients(watched: WatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a network, nor by a pipeline itself: `encode` is no call that waits for others."""
    vae = watched.engine._executor.runner._pipe.vae
    compute, encode = gpu_diffusion_worker.compute, vae.encode
    modes: list[bool] = []

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            modes.append(torch.is_grad_enabled())
            return function(*args, **kwargs)

        return watching

    def on_step(num_steps: int) -> None:
        modes.append(torch.is_grad_enabled())
        if num_steps in arrivals:
            watched.engine.inbox.put(arrivals[num_steps])
        if num_steps == 3:
            watched.engine.abort("left")

    arrivals = {1: change("left", 8), 2: change("long", 12), 6: change("late", 4)}
    monkeypatch.setattr(gpu_diffusion_worker, "compute", watch(compute))
    monkeypatch.setattr(vae, "encode", watch(encode))
    with torch.enable_grad():
        watched.run(change("short", 3), on_item=watched.stop_after(3), on_step=on_step)
        assert torch.is_grad_enabled(), "the thread that ran the engine is as it was"

    order = watched.outbox.order
    assert "long" in order[len(order) - order[::-1].index("short") :], "one has to end while another one runs"
    assert len(modes) > 30 and not any(modes)
    assert not any(watched.tensors(name)["image"].requires_grad for name in ("short", "long", "late"))
