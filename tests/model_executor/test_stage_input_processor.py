# SPDX-License-Identifier: Apache-2.0
"""A stage input processor reads the configuration that its stage's engine reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from tests.diffusion.indexes import write_index
from tests.hub_cache import NAME, HubCache
from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor, load_stage_input_processor
from vllm_omni.outputs import StageOutput


class Reader(StageInputProcessor):
    """Has a configuration, and makes nothing."""

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
        return None


def read(model: str, **engine_args: Any) -> PretrainedConfig:
    """What the processor of a stage with these arguments sees."""
    stage = OmniStageConfig(stage_id=1, engine_args=engine_args, custom_process_input_func=f"{__name__}.Reader")
    processor = load_stage_input_processor(stage, model)
    assert processor is not None
    return processor.hf_config


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    return HubCache(tmp_path / "hub", monkeypatch)


def set_value(file: Path, key: str, value: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))


def test_the_revision_is_the_stages(cache: HubCache, tiny_qwen3: Path) -> None:
    for revision in ("main", "v2"):
        set_value(cache.add(tiny_qwen3, revision) / "config.json", "read_from", revision)

    assert read(NAME).read_from == "main"
    config = read(NAME, revision="v2")
    assert config.read_from == "v2"
    assert (config.name_or_path, config.omni_revision) == (NAME, "v2")


def test_the_revision_of_a_diffusers_checkpoint_is_the_stages(cache: HubCache, tmp_path: Path) -> None:
    for revision, name in (("main", "FluxPipeline"), ("v2", "WanPipeline")):
        cache.add(Path(write_index(tmp_path / name, name)), revision)

    assert read(NAME)._class_name == "FluxPipeline"
    assert read(NAME, revision="v2")._class_name == "WanPipeline"


def test_the_configuration_can_be_in_another_folder(tiny_qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_qwen3 / "config.json").read_text())
    set_value(tmp_path / "config.json", "read_from", "elsewhere")

    config = read(str(tiny_qwen3), hf_config_path=str(tmp_path))

    assert config.read_from == "elsewhere" and config.name_or_path == str(tiny_qwen3)


def test_overrides_apply_to_the_part_that_is_the_stages(tiny_qwen3_omni_moe: Path) -> None:
    overrides = {"num_hidden_layers": 7, "text_config": {"num_hidden_layers": 9}}

    config = read(str(tiny_qwen3_omni_moe), hf_config_name="talker_config", hf_overrides=overrides)

    assert (config.talker_config.num_hidden_layers, config.talker_config.text_config.num_hidden_layers) == (7, 9)
    assert config.thinker_config.text_config.num_hidden_layers not in (7, 9)
