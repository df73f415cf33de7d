# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md names every key with its default, and its examples load."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from vllm_omni.config import stage_config
from vllm_omni.config.dit_config import DiTConfig, parse_dit_config
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.config.stage import StageRuntimeConfig
from vllm_omni.model_executor.transformers_model import TransformersSettings

DOCUMENT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
CLASSES = {
    "## `stage_args[]`": stage_config.OmniStageConfig,
    "### `engine_args` of a `DiT` stage": DiTConfig,
    "### `engine_args` of a `transformers` stage": TransformersSettings,
    "## `stage_args[].runtime`": StageRuntimeConfig,
    "## `runtime`": stage_config.RuntimeConfig,
    "### `runtime.defaults`": stage_config.RuntimeDefaults,
    "### `runtime.edges[]`": stage_config.EdgeConfig,
    "### `runtime.ar`": stage_config.SegmentConfig,
    "### `runtime.restart`": stage_config.RestartConfig,
    "### `runtime.connectors`": stage_config.ConnectorConfig,
}
EXAMPLES = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)


def documented(heading: str) -> dict[str, str]:
    """The keys of the first table below a heading, with the text of their default."""
    table = re.search(r"^\|.*?\n\n", DOCUMENT.split(heading + "\n")[1], re.DOTALL | re.MULTILINE)
    assert table is not None
    rows = [line.split("|")[1:3] for line in table[0].strip().splitlines()[2:]]
    return {key: default.strip() for keys, default in rows for key in re.findall("`(.*?)`", keys)}


@pytest.mark.parametrize("heading", CLASSES)
def test_every_key_is_described_with_its_default(heading: str) -> None:
    table = documented(heading)
    fields = {field.encode_name: field for field in msgspec.inspect.type_info(CLASSES[heading]).fields}
    assert sorted(table) == sorted(fields)
    for key, field in fields.items():
        if field.required:
            assert table[key] == "required", key
        elif field.default not in (msgspec.NODEFAULT, None) and not isinstance(field.default, msgspec.Struct):
            assert table[key] == f"`{yaml.safe_dump(field.default).split(chr(10))[0]}`", key


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_load(text: str) -> None:
    raw: dict[str, Any] = yaml.safe_load(text)
    for stage in raw["stage_args"]:  # required keys that the example leaves out
        stage.setdefault("engine_type", "AR" if "engine_args" in stage else "fake")
        if "function" in stage:
            stage["function"] = "builtins.dict"  # for one of a package that does not exist
    raw["stage_args"][-1] |= {"final_output": True, "final_output_type": "text"}
    config = parse_pipeline_config(raw, "docs/configuration.md")
    assert len(config.stage_args) == len(raw["stage_args"])
    for stage in config.stage_args:
        if stage.kind.params == "diffusion":
            parse_dit_config(stage.engine_args, stage.name)
