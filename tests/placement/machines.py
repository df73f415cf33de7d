# SPDX-License-Identifier: Apache-2.0
"""Simulated machines: the answers of vLLM's platform when stages are placed."""

from dataclasses import dataclass
from typing import Any

import pytest

from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.placement import budgets, cores, devices

VARIABLE = "SOME_VISIBLE_DEVICES"


@dataclass
class FakePlatform:
    """An accelerator platform; `sizes` is the memory of each visible device, in bytes."""

    sizes: list[int]
    device_control_env_var: str = VARIABLE

    def is_cpu(self) -> bool:
        return False

    def device_count(self) -> int:
        return len(self.sizes)

    def get_device_total_memory(self, device_id: int) -> int:
        return self.sizes[device_id]


def install(monkeypatch: pytest.MonkeyPatch, *sizes: int, visible: str | None = None) -> None:
    """Makes this process see accelerators of these sizes, in bytes."""
    platform = FakePlatform(list(sizes))
    for module in (devices, budgets, cores):
        monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.delenv(VARIABLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VARIABLE, visible)


def pipeline(*stages: dict[str, Any]) -> PipelineConfig:
    """Stages a, b, c ...: the keys of each one's `runtime`, and optionally `engine_type` and `engine_args`."""
    raw = []
    for i, runtime in enumerate(stages):
        runtime = dict(runtime)
        stage: dict[str, Any] = {"stage_id": i, "engine_type": runtime.pop("engine_type", "AR")}
        stage["engine_args"] = {"model_stage": "abcdef"[i], **runtime.pop("engine_args", {})}
        raw.append(stage | {"runtime": runtime, "final_output": True, "final_output_type": "text"})
    return parse_pipeline_config({"stage_args": raw}, "my.yaml")
