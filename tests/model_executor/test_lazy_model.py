# SPDX-License-Identifier: Apache-2.0
"""What vLLM knows of an architecture of ours is found out without a process for it."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.models import registry

from vllm_omni.model_executor import lazy_model
from vllm_omni.model_executor.lazy_model import LazyModel
from vllm_omni.model_executor.registry import OMNI_MODELS

MODEL = LazyModel(*OMNI_MODELS["Qwen3OmniMoeThinkerForConditionalGeneration"].split(":"))


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What vLLM would run in processes, each with an empty cache."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    started: list[Callable[[], Any]] = []

    def run(work: Callable[[], Any]) -> Any:
        started.append(work)
        return work()

    monkeypatch.setattr(registry, "_run_in_subprocess", run)
    return started


def test_it_is_imported_once(processes: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = MODEL.inspect_model_cls()
    assert first.architecture == MODEL.class_name and first.supports_multimodal
    monkeypatch.setattr(registry._LazyRegisteredModel, "load_model_cls", lambda self: pytest.fail("it was kept"))
    assert as_json(MODEL.inspect_model_cls()) == as_json(first) and processes == []
    assert len(list((tmp_path / "modelinfos").iterdir())) == 1


def test_where_cuda_may_be_a_process_does_it(processes: list, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = MODEL.inspect_model_cls()
    monkeypatch.setattr(lazy_model.current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(LazyModel, "_load_modelinfo_from_cache", lambda self, module_hash: None)
    assert as_json(MODEL.inspect_model_cls()) == as_json(expected) and len(processes) == 1


def as_json(info: registry._ModelInfo) -> str:
    """As it is kept: a tuple is a list there."""
    return json.dumps(asdict(info))
