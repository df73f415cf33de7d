# SPDX-License-Identifier: Apache-2.0
"""docs/stability.md names what there is."""

import re
import tomllib

import vllm_omni
from tests.docs.pages import ROOT
from vllm_omni.entrypoints.cli import main
from vllm_omni.model_packages import find_models

TEXT = (ROOT / "docs" / "stability.md").read_text()


def names(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_stable_names() -> None:
    (imports,) = re.findall(r"^The names of `vllm_omni` are (.*?)\. ", TEXT, re.DOTALL | re.MULTILINE)
    assert names(imports) == set(vllm_omni.__all__)
    (commands,) = re.findall(r"^\| commands \| (.*?);", TEXT, re.MULTILINE)
    assert names(commands.partition("those of `vllm-omni`:")[2]) == {*main._COMMANDS, *find_models().commands}
    (extras,) = re.findall(r"^\| extras \| (.*?) \|", TEXT, re.MULTILINE)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert names(extras) == known.keys() - {"test", "lint", "docs"}
