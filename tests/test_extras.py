# SPDX-License-Identifier: Apache-2.0
"""What is installed by an error's or a page's command is never the other project of this distribution's name."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from vllm_omni.extras import install_command

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BY_NAME = re.compile(r"pip3? install[^`#]* ['\"]?vllm[-_]omni\b(?!/)|['\"(`, ]vllm[-_]omni\[|= \[\"vllm[-_]omni")
SOURCES = [
    path
    for name in ("README.md", "CONTRIBUTING.md", "Dockerfile", "docs", "examples", "packages", "vllm_omni", "scripts")
    for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    if path.suffix in (".md", ".py", ".toml", ".txt", ".sh", ".yaml", ".service", ".ipynb") or path.name == "Dockerfile"
    if ".egg-info" not in str(path) and "build" not in path.parts
]


def test_the_packages_of_an_extra_are_named() -> None:
    assert install_command("ray") == "pip install 'ray<2.61,>=2.60'"
    assert install_command("talk", "gguf", "pocketsphinx") == "pip install 'gguf<0.20,>=0.19' 'pocketsphinx<6,>=5.1'"


@pytest.mark.parametrize("lines", [None, ["numpy>=2", 'foreign>=1; extra == "other"']])
def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, lines: list[str] | None) -> None:
    def requires(name: str) -> list[str]:
        if lines is None:
            raise metadata.PackageNotFoundError(name)
        return lines

    monkeypatch.setattr(metadata, "requires", requires)
    assert install_command("ray") == "pip install '.[ray]' in a checkout of this project"


def test_extras_exist() -> None:
    text = "".join(path.read_text() for path in SOURCES)
    named = set(re.findall(r"install_command\(['\"]([\w-]+)|\bextra `([\w-]+)`", text))
    assert {next(filter(None, names)) for names in named} <= EXTRAS.keys()
    assert named


@pytest.mark.parametrize(
    "wrong", ["pip install 'vllm-omni[ui]'", "pip install --quiet vllm_omni", 'dependencies = ["vllm-omni"]']
)
def test_the_name_is_found(wrong: str) -> None:
    assert BY_NAME.search(wrong)


def test_nothing_installs_this_project_by_its_name() -> None:
    lines = [(path, line) for path in SOURCES for line in path.read_text().splitlines()]
    assert not [f"{path}: {line}" for path, line in lines if BY_NAME.search(line)]
