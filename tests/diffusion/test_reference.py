# SPDX-License-Identifier: Apache-2.0
"""docs/diffusion.md names every setting of a request with its default, and its stage configurations load."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from tests.diffusion import rewriting
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.sampling_params import DiffusionSamplingParams

DOCUMENT = (Path(__file__).parents[2] / "docs" / "diffusion.md").read_text()


def test_every_field_is_described_with_its_default() -> None:
    table = DOCUMENT.split("| field | default | meaning |\n")[1].split("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[1:]]
    described = {field: default.strip() for fields, default in rows for field in re.findall("`(.*?)`", fields)}

    fields = {field.name: field for field in msgspec.structs.fields(DiffusionSamplingParams)}
    assert sorted(described) == sorted(fields)
    for name, field in fields.items():
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        assert described[name] == ("none" if default is None else f"`{default}`"), name


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL))
def test_examples_load(text: str) -> None:
    raw = yaml.safe_load(text.replace("my_project.rewriting", rewriting.__name__))
    assert len(parse_pipeline_config(raw, "docs/diffusion.md").stage_args) == len(raw["stage_args"])


def test_the_input_processor_is_the_one_that_is_tested() -> None:
    (shown,) = re.findall(r"\n(class .*?)```", DOCUMENT, re.DOTALL)
    assert shown in Path(rewriting.__file__).read_text()
