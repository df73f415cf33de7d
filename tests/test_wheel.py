# SPDX-License-Identifier: Apache-2.0
"""The wheel holds the whole package and the stage configurations, and both are found once it is installed."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_omni.config.paths import stage_configs_dir

ROOT = Path(__file__).parents[1]
CONFIGS = {path.name for path in (ROOT / "stage_configs").glob("*.yaml")}


def test_a_checkout_finds_the_top_level_folder():
    assert CONFIGS
    assert {path.name for path in stage_configs_dir().glob("*.yaml")} == CONFIGS


def test_the_wheel_holds_every_module_and_every_stage_configuration(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_omni").rglob("*.py")}
    configs = {f"vllm_omni/stage_configs/{name}" for name in CONFIGS}
    assert modules | configs | {"vllm_omni/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "build/"))]


def test_an_installed_wheel_finds_its_stage_configurations(wheel, tmp_path):
    pip("install", "--no-deps", "--target", tmp_path, wheel)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from vllm_omni.config.paths import stage_configs_dir;"
        "d = stage_configs_dir(); print(d, *sorted(p.name for p in d.glob('*.yaml')))"
    )
    said = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(tmp_path / "vllm_omni" / "stage_configs"), *sorted(CONFIGS)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the tree, so that nothing an earlier build left behind gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("vllm_omni", "stage_configs"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    (built,) = out.glob("vllm_omni-*.whl")
    return built


def pip(*arguments) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
