# SPDX-License-Identifier: Apache-2.0
"""The wheel has the whole package, stage configurations and models, and they are found after installation."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_omni.config.utils import stage_configs_dir

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CONFIGS = {path.name for path in (ROOT / "stage_configs").glob("*.yaml")}


def test_a_checkout_finds_the_top_level_folder():
    assert CONFIGS
    assert {path.name for path in stage_configs_dir().glob("*.yaml")} == CONFIGS


def test_the_wheel_has_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith("vllm_omni-")}
    package = {path for path in (ROOT / "vllm_omni").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    configs = {f"vllm_omni/stage_configs/{name}" for name in CONFIGS}
    assert names == {str(path.relative_to(ROOT)) for path in package} | configs


def test_an_installed_wheel_finds_its_stage_configurations(installed):
    output = run_installed(
        installed,
        "from vllm_omni.config.utils import stage_configs_dir; d = stage_configs_dir();"
        "print(d, *sorted(p.name for p in d.glob('*.yaml')))",
    )
    assert output.split() == [str(installed / "vllm_omni" / "stage_configs"), *sorted(CONFIGS)]


def test_the_wheel_is_small(wheel):
    assert wheel.stat().st_size < 40e6


def test_without_vllm_the_first_use_is_one_clear_error(installed):
    output = run_installed(
        installed,
        "import sys, vllm_omni, vllm_omni.entrypoints.cli.main as cli; sys.argv = ['vllm-omni', '--version'];"
        "cli.main()\n"
        "try: vllm_omni.OmniLLM\n"
        "except ImportError as error: print(type(error).__name__, error)",
        "-S",  # no site-packages, so no vLLM
    )
    version, error = output.split("\n", 1)
    assert version.endswith("(vLLM is not installed)")
    assert error.startswith("VllmRequirementError vllm_omni needs vLLM 0.32, and found no vLLM.\nInstall one of")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the tree, without files of earlier builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("vllm_omni", "stage_configs"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    (built,) = out.glob("vllm_omni-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the installed wheel only: no dependencies, no vLLM."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", target, wheel)
    return target


def run_installed(target: Path, code: str, *flags: str) -> str:
    """Runs code with the folder first on its path, without what servers of other tests have set for vLLM."""
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n{code}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    command = [sys.executable, "-I", *flags, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def pip(*arguments) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
