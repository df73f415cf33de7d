# SPDX-License-Identifier: Apache-2.0
"""Each wheel has its whole package: stage configurations, models; and they are found after installation."""

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
SHAPES = ROOT / "packages" / "coloured_shapes"
CORE = ("vllm_omni", "packages/playground/vllm_omni_playground", "packages/talk/vllm_omni_talk")
"""The packages of the first wheel."""
CONFIGS = {path.name for path in (ROOT / "stage_configs").glob("*.yaml")}


def test_a_checkout_finds_the_top_level_folder():
    assert CONFIGS
    assert {path.name for path in stage_configs_dir().glob("*.yaml")} == CONFIGS


def test_the_wheel_has_every_file_of_the_package(wheel):
    configs = {f"vllm_omni/stage_configs/{name}" for name in CONFIGS}
    below = (files_below((ROOT / folder).parent, Path(folder).name) for folder in CORE)
    assert files_of(wheel) == configs.union(*below)


def test_the_wheel_of_the_shapes_has_every_file_of_the_package(shapes_wheel):
    names = files_below(SHAPES, "coloured_shapes")
    assert len([name for name in names if name.endswith(".safetensors")]) == 7
    assert files_of(shapes_wheel) == names
    with zipfile.ZipFile(shapes_wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
        (license,) = (archive.read(name) for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
    assert "License-Expression: Apache-2.0\n" in metadata and license == (ROOT / "LICENSE").read_bytes()


def files_of(wheel: Path) -> set[str]:
    """Without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def files_below(root: Path, package: str) -> set[str]:
    files = (path for path in (root / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(root)) for path in files}


def test_an_installed_wheel_finds_its_stage_configurations(installed):
    output = run_installed(
        installed,
        "from vllm_omni.config.utils import stage_configs_dir; d = stage_configs_dir();"
        "print(d, *sorted(p.name for p in d.glob('*.yaml')))",
    )
    assert output.split() == [str(installed / "vllm_omni" / "stage_configs"), *sorted(CONFIGS)]


def test_the_wheels_are_small(wheel, shapes_wheel):
    assert wheel.stat().st_size < 2e6
    assert shapes_wheel.stat().st_size < 40e6


def test_installed_models_are_found_by_their_names(installed, shapes_wheel):
    code = (
        "from vllm_omni.model_packages import find_models; print(*sorted(map(str, find_models().checkpoints.values())))"
    )
    own = [str(installed / "vllm_omni_talk" / "checkpoints" / "talk")]
    assert run_installed(installed, code, "-S").split() == own
    pip("install", "--no-deps", "--target", installed, shapes_wheel)
    shapes = [str(installed / "coloured_shapes" / "checkpoints" / name) for name in ("shapes", "shapes-painter")]
    assert run_installed(installed, code, "-S").split() == shapes + own


def test_the_installed_playground_is_found(installed):
    code = "import sys; from vllm_omni.entrypoints.cli.main import main; sys.argv[1:] = ['--help']; main()"
    assert "vllm-omni playground URL [options]" in run_installed(installed, code, "-S")


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
    needed = "vllm_omni needs vLLM 0.32 or 0.33, and found no vLLM."
    assert error.startswith(f"VllmRequirementError {needed}\nInstall one of")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    names = ("pyproject.toml", "README.md", "LICENSE", "stage_configs", *CORE)
    return build(tmp_path_factory, ROOT, *names)


@pytest.fixture(scope="module")
def shapes_wheel(tmp_path_factory) -> Path:
    return build(tmp_path_factory, SHAPES, "pyproject.toml", "README.md", "LICENSE", "coloured_shapes")


def build(tmp_path_factory, root: Path, *names: str) -> Path:
    """A wheel of a copy of the tree, without files of earlier builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in names:
        if (root / name).is_dir():
            shutil.copytree(root / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the installed wheel of the core only: no dependencies, no vLLM, no other models."""
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
