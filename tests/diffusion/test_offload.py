# SPDX-License-Identifier: Apache-2.0
"""Which components are on the accelerator. Without one: some modules only record where they were moved, and a pipeline
is moved from the CPU to the CPU, by everything that would move it elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import add_hook_to_module
from diffusers import DiffusionPipeline

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.batched_call import compute
from vllm_omni.diffusion.job import DiffusionJob
from vllm_omni.diffusion.loader import load_pipeline
from vllm_omni.diffusion.offload import OneAtATime, place_modules
from vllm_omni.errors import StageConfigError
from vllm_omni.testing.diffusers_oracle import DiffusersOracle
from vllm_omni.worker.gpu_diffusion_model_runner import DiffusionModelRunner

CPU = torch.device("cpu")
ELSEWHERE = torch.device("meta")  # as good as any that is not the CPU: nothing is computed
ARGUMENTS = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 64}


class Component(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = "cpu"

    def to(self, device: Any) -> "Component":  # type: ignore[override]
        self.place = str(device)
        return self

    def forward(self, x: torch.Tensor) -> torch.device:
        assert self.place == "meta"
        return x.device


def test_a_component_is_on_the_device_only_when_it_is_called() -> None:
    components = [Component() for _ in range(3)]
    for component in components:
        add_hook_to_module(component, OneAtATime(ELSEWHERE, components))
    for called in (0, 1, 1, 0, 2, 1):  # as calls that run side by side need them: in any order
        assert components[called](torch.ones(1)).type == "meta"
        assert [c.place for c in components] == ["meta" if i == called else "cpu" for i in range(3)]


def test_the_pipeline_computes_on_the_onload_device() -> None:
    component = Component()
    add_hook_to_module(component, OneAtATime(ELSEWHERE, [component]))

    class Pipeline(DiffusionPipeline):
        components = property(lambda self: {"transformer": component})

    assert Pipeline()._execution_device == ELSEWHERE


def generate(runner: DiffusionModelRunner, pipe: DiffusionPipeline, seeds: list[int]) -> list[torch.Tensor]:
    """Concurrent images, each module call computed alone."""
    ends = []
    for seed in seeds:
        job = DiffusionJob(
            request_id=str(seed), index=0, pipeline_class=type(pipe), arguments={"prompt": "a", **ARGUMENTS}, seed=seed
        )
        ends.append(runner.start(job))
    while runner.running:
        running = runner.running[0]
        ends.append(runner.resume(running, *compute([running.waiting_call])))
    return [end.output for end in ends if end is not None]


@pytest.mark.parametrize("offload", ["model", "group", "sequential"])
def test_images_with_offloaded_weights(tiny_diffusion: Callable[[str], Path], offload: Any) -> None:
    config = DiTConfig(offload=offload)
    pipe = load_pipeline(str(tiny_diffusion("z_image")), DiTConfig(), CPU)
    place_modules(pipe, {name: pipe.components[name] for name in ("text_encoder", "transformer", "vae")}, config, CPU)
    runner = DiffusionModelRunner(pipe, config, CPU)
    oracle = DiffusersOracle(tiny_diffusion("z_image"))
    for _ in range(2):  # the hooks stay after an image
        for seed, image in zip((1, 2), generate(runner, pipe, [1, 2]), strict=True):
            assert (image - oracle.generate("a", seed=seed, **ARGUMENTS)).abs().max() < 1e-4


def test_weights_larger_than_the_device() -> None:
    class TooLarge(torch.nn.Module):
        def to(self, *args: Any) -> "TooLarge":  # type: ignore[override]
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    with pytest.raises(StageConfigError, match=r"does not fit on cpu: tried to allocate 20 GiB; set .*offload"):
        place_modules(DiffusionPipeline(), {"transformer": TooLarge()}, DiTConfig(), CPU)
