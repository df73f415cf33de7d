# SPDX-License-Identifier: Apache-2.0
"""Which components are on the accelerator, with modules that only say where they were sent."""

from typing import Any

import torch
from accelerate.hooks import add_hook_to_module
from diffusers import DiffusionPipeline

from vllm_omni.diffusion.placement import OneAtATime

DEVICE = torch.device("meta")  # as good as any that is not the CPU: nothing is computed


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


def test_a_component_comes_when_it_is_called_and_the_others_go() -> None:
    components = [Component() for _ in range(3)]
    for component in components:
        add_hook_to_module(component, OneAtATime(DEVICE, components))
    for called in (0, 1, 1, 0, 2, 1):  # as calls that run side by side need them: in any order
        assert components[called](torch.ones(1)).type == "meta"
        assert [c.place for c in components] == ["meta" if i == called else "cpu" for i in range(3)]


def test_the_pipeline_computes_where_they_come_to() -> None:
    component = Component()
    add_hook_to_module(component, OneAtATime(DEVICE, [component]))

    class Pipeline(DiffusionPipeline):
        components = property(lambda self: {"transformer": component})

    assert Pipeline()._execution_device == DEVICE
