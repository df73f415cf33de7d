# SPDX-License-Identifier: Apache-2.0
"""The Python of a stage that has its own: found on this machine, or an environment that is made once in the cache.

An environment is made beside its place by uv, where that is installed, else by venv and pip; it is moved there when it
is whole. So one that is there is whole, and needs no network.
"""

import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from vllm_omni.config.stage import OmniStageConfig
from vllm_omni.distributed.locked_folder import LockedFolder, alone, user_cache
from vllm_omni.errors import PipelineStartError, StageConfigError
from vllm_omni.metrics.logs import get_logger
from vllm_omni.stage.engines.agent_program import OLDEST

logger = get_logger(__name__)

_PROBE = """
import json, sys
try:
    import numpy
    found = numpy.__version__
except Exception as error:
    found = None
print(json.dumps([list(sys.version_info[:3]), found]))
"""
PROBE_S = 60.0
"""For an interpreter to answer."""
_OF_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
_PROGRESS = ("Collecting", "Downloading", "Building", "Installing", "Resolved", "Prepared", "Installed", "Creating")
"""How the lines of pip and uv begin that are logged."""
_NUM_LINES = 6
"""Of an error of pip or uv."""
_LITTLE_MIB = 1024
_NEEDED = "numpy"
"""What an agent needs itself."""


@dataclass(frozen=True)
class StagePython:
    """A Python on this machine that an agent can run on.

    Attributes:
        path: Of the program.
        version, numpy: Versions, such as `3.9.18` and `1.26.4`.
    """

    path: str
    version: str
    numpy: str

    def __str__(self) -> str:
        return f"Python {self.version} with numpy {self.numpy} ({self.path})"

    def environment(self) -> dict[str, str]:
        """The environment variables of this process, as they would be where the Python's environment is active."""
        path = os.pathsep.join([str(Path(self.path).parent), os.environ.get("PATH", os.defpath)])
        return _without_ours() | {"PATH": path}


def find_python(given: str, where: str) -> StagePython:
    """
    Args:
        given: A path, or a name on `PATH`.
        where: The stage's label.

    Raises:
        StageConfigError: There is no such program, it is no Python or one that is too old, or has no numpy.
    """
    key = f"{where}: runtime.python"
    path = shutil.which(os.path.expanduser(given))
    if path is None:
        inside = Path(os.path.expanduser(given), "bin", "python")
        hint = f"; did you mean {str(inside)!r}?" if inside.exists() else ""
        raise StageConfigError(f"{key}: {given!r} is no program on this machine{hint}")
    version, numpy = _probe(os.path.abspath(path), key)
    shown = ".".join(map(str, version))
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise StageConfigError(f"{key}: {given!r} is Python {shown}; a stage needs {oldest} or newer")
    if numpy is None:
        raise StageConfigError(f"{key}: {given!r} cannot import numpy; install it: {path} -m pip install numpy")
    return StagePython(os.path.abspath(path), shown, numpy)


def _probe(path: str, key: str) -> tuple[tuple[int, ...], str | None]:
    """The versions of a Python and of its numpy; None: it cannot import that."""
    try:
        result = subprocess.run(
            [path, "-I", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
            env=_without_ours(),
        )
        version, numpy = json.loads(result.stdout.strip().splitlines()[-1])
        return tuple(version), numpy
    except subprocess.TimeoutExpired as error:
        raise StageConfigError(f"{key}: {path!r} has not answered within {PROBE_S:g} s") from error
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise StageConfigError(f"{key}: {path!r} is no Python that runs: {error}") from error


def _without_ours() -> dict[str, str]:
    """The environment variables of this process but for those that are about its own Python."""
    return {name: value for name, value in os.environ.items() if name not in _OF_OUR_PYTHON}


def check_packages(stage: OmniStageConfig) -> None:
    """
    Raises:
        StageConfigError: A stage has both `python` and `packages`, or a requirement is wrong.
    """
    runtime, where = stage.runtime, stage.label
    if runtime.python is not None and runtime.packages:
        raise StageConfigError(
            f"{where}: runtime.python and runtime.packages: an environment of packages has its own Python; remove one "
            "of them, or install the packages there"
        )
    for line in runtime.packages:
        try:
            Requirement(line)
        except InvalidRequirement as error:
            raise StageConfigError(
                f"{where}: runtime.packages: {line!r} is no requirement, such as 'piper-tts==1.8.0': {error}"
            ) from error


def environment_python(packages: Sequence[str]) -> Path:
    """Where the Python of the environment with these packages is, or will be.

    Raises:
        PipelineStartError: The user has no home folder.
    """
    version = f"{sys.implementation.cache_tag}"
    digest = hashlib.sha256(json.dumps([version, sorted(packages)]).encode()).hexdigest()[:16]
    return user_cache("packages", "environments of stages") / f"{version}-{digest}" / "bin" / "python"


def make_environment(packages: Sequence[str], where: str) -> Path:
    """The Python of the environment with these packages. The first call on a machine makes it.

    Args:
        where: The stage's label.

    Raises:
        PipelineStartError: It could not be made: the message has what pip or uv says. Nothing is left of it.
    """
    python = environment_python(packages)
    if python.exists():
        return python
    folder = python.parents[1]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder.with_name(f"{folder.name}.lock"), f"installs {', '.join(packages)}", logger):
            if not python.exists():
                _make(folder, packages, where)
    except OSError as error:
        raise PipelineStartError(
            f"{where}: runtime.packages: {folder.parent}: {error.strerror or error}; free space there and make it "
            "writable, or set XDG_CACHE_HOME to another folder"
        ) from error
    return python


def _make(folder: Path, packages: Sequence[str], where: str) -> None:
    """Makes an environment beside its place. Also removes what killed processes have left there."""
    logger.info("%s: installs %s, once, in %s", where, ", ".join(packages), folder)
    unfinished = LockedFolder(folder.parent, f".{folder.name}-")
    try:
        path = unfinished.path / "environment"
        python = str(path / "bin" / "python")
        requirements = [*packages, *([] if any(map(_is_needed, packages)) else [_NEEDED])]
        if (uv := _find_uv()) is not None:
            _run([uv, "venv", "--relocatable", "--python", sys.executable, str(path)], unfinished, where)
            _run([uv, "pip", "install", "--python", python, *requirements], unfinished, where)
        else:
            _run([sys.executable, "-m", "venv", str(path)], unfinished, where)
            install = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *requirements]
            _run(install, unfinished, where)
        shutil.rmtree(folder, ignore_errors=True)  # of a Python that is not there any more
        path.rename(folder)
    finally:
        unfinished.remove()
    logger.info("%s: installed %s", where, ", ".join(packages))


def _is_needed(package: str) -> bool:
    return Requirement(package).name.lower() == _NEEDED


@functools.cache
def _find_uv() -> str | None:
    """The program uv, on `PATH` or in this Python."""
    if (path := shutil.which("uv")) is not None or importlib.util.find_spec("uv") is None:
        return path
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else None


def _run(command: Sequence[str], unfinished: LockedFolder, where: str) -> None:
    """Runs a program, and logs its progress. It holds the folder's lock, too: after a kill of this process the folder
    is not removed while the program writes there.

    Raises:
        PipelineStartError: It failed. The message has its last lines.
    """
    last: deque[str] = deque(maxlen=_NUM_LINES)
    environment: Mapping[str, str] = _without_ours() | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=[unfinished.fileno()],
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                last.append(line.rstrip())
            if line.strip().startswith(_PROGRESS):
                logger.info("%s: %s", where, line.strip())
    if process.returncode:
        if (free := shutil.disk_usage(unfinished.path).free >> 20) < _LITTLE_MIB:
            last.append(f"{unfinished.path.parent} has only {free} MiB of free space")
        lines = "\n  ".join(last)
        raise PipelineStartError(
            f"{where}: runtime.packages: {' '.join(command[:4])} ... failed (status {process.returncode}):\n  {lines}"
        )
