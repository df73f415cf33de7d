# SPDX-License-Identifier: Apache-2.0
"""The Python of a stage that has its own: what is refused, and how an environment of packages is made."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.small_file_system import small_file_system
from tests.stage.agent_stages import shout
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.errors import PipelineStartError, StageConfigError
from vllm_omni.stage import python

LABEL = "stage 0 (tts)"


def config(engine_type: str = "function", **runtime: Any) -> dict[str, Any]:
    function = {"function": f"{shout.__module__}.shout"} if engine_type == "function" else {}
    names = {"engine_args": {"model_stage": "tts"}, "final_output": True, "final_output_type": "text"}
    return {"stage_args": [{"stage_id": 0, "engine_type": engine_type, "runtime": runtime} | function | names]}


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (
            config("fake", python="python3"),
            "runtime.python and runtime.packages are for stages with a function, which fake",
        ),
        (config("AR", packages=["numpy"]), "for stages with a function, which AR is not; remove them"),
        (
            config(python="python3", packages=["numpy"]),
            "an environment of packages has its own Python; remove one of them",
        ),
        (
            config(packages=["numpy", "piper tts"]),
            "runtime.packages: 'piper tts' is no requirement, such as 'piper-tts==",
        ),
        (config(packages=["--index-url=x"]), "'--index-url=x' is no requirement"),
        (config(packages="numpy"), "Expected `array`"),
    ],
)
def test_wrong_keys_are_refused(stages: dict[str, Any], words: str) -> None:
    with pytest.raises(StageConfigError, match=re.escape(words)):
        parse_pipeline_config(stages, "test")


@pytest.mark.parametrize("runtime", [{"python": "python3"}, {"packages": ["numpy"]}])
def test_a_checkpoint_may_not_set_them(runtime: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        StageConfigError, match=f"runtime.{next(iter(runtime))}: a checkpoint's own configuration may not"
    ):
        parse_pipeline_config(config("fake", **runtime), "test", tmp_path)


def test_a_python_of_another_machine_is_shown_as_such() -> None:
    (stage,) = parse_pipeline_config(config(python="/opt/there/bin/python"), "test").stage_args
    assert stage.kind.describe_python() == "/opt/there/bin/python, which is not on this machine"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo '[[3, 8, 18], \"1.24\"]'", "is Python 3.8.18; a stage needs 3.9 or newer"),
        ("echo '[[3, 12, 1], null]'", "cannot import numpy; install it: {path} -m pip install numpy"),
        ("echo hello", "is no Python that runs"),
        ("exit 1", "is no Python that runs"),
    ],
)
def test_a_wrong_python_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = script(tmp_path / "python", text)
    stage = parse_pipeline_config(config(python=str(path)), "test").stage_args[0]
    with pytest.raises(StageConfigError, match=re.escape(words.format(path=path))) as raised:
        stage.kind.check_machine()
    assert str(raised.value).startswith(f"{LABEL}: runtime.python: ")


def test_a_python_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python, "PROBE_S", 0.1)
    path = script(tmp_path / "python", "exec sleep 1000")
    with pytest.raises(StageConfigError, match="has not answered within"):
        python.find_python(str(path), LABEL)


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "python", "")
    with pytest.raises(StageConfigError, match=r"is no program on this machine; did you mean '.*/bin/python'"):
        python.find_python(str(tmp_path), LABEL)
    with pytest.raises(StageConfigError, match=r"'/opt/none/python' is no program on this machine$"):
        python.find_python("/opt/none/python", LABEL)


def test_a_python_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (stage,) = parse_pipeline_config(config(python=sys.executable), "test").stage_args
    version = ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(rf"Python {version} with numpy \S+ \({sys.executable}\)", stage.kind.describe_python() or "")
    (stage,) = parse_pipeline_config(config(packages=["numpy"]), "test").stage_args
    assert re.fullmatch(
        r"\S*/vllm_omni/packages/\S*/bin/python, made at the first start", stage.kind.describe_python() or ""
    )
    (stage,) = parse_pipeline_config(config(), "test").stage_args
    assert stage.kind.describe_python() is None
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert python.find_python("python", LABEL).path == str(Path(sys.executable).with_name("python"))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages without a network, and a cache that is empty. Returns the folder of the wheels."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("numpy", "tiny_voice"):
        write_wheel(folder, name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(python, "_find_uv", lambda: None)
    return folder


@pytest.fixture(scope="module")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m venv` makes, in 3 s."""
    folder = tmp_path_factory.mktemp("venv") / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def quick_venv(new_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments are copies of one, which are as good: they have no packages yet."""
    run = python._run

    def run_or_copy(command: Sequence[str], *others: Any) -> None:
        if list(command[:3]) == [sys.executable, "-m", "venv"]:
            shutil.copytree(new_environment, command[3], symlinks=True)
        else:
            run(command, *others)

    monkeypatch.setattr(python, "_run", run_or_copy)


def write_wheel(folder: Path, name: str) -> None:
    """A package of one line. The numpy here only has a version."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "__version__ = '1.0'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def left_in(cache: Path) -> list[str]:
    """What is in the folder of environments, but for locks."""
    return sorted(path.name for path in (cache / "vllm_omni" / "packages").iterdir() if path.suffix != ".lock")


@pytest.mark.usefixtures("quick_venv")
def test_an_environment_is_made_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, python.logger.name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(python.make_environment(["tiny-voice==1.0"], LABEL)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3 and len(set(made)) == 1
    assert caplog.text.count("installs tiny-voice==1.0, once") == 1 and f"{LABEL}: Installing collected" in caplog.text
    code = "import tiny_voice, sys; print(tiny_voice.__version__, sys.prefix)"
    shown = subprocess.run([made[0], "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["1.0", str(made[0].parents[1])]
    assert left_in(tmp_path / "cache") == [made[0].parents[1].name]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nothing")
    monkeypatch.setattr(python, "_run", None)  # Nothing is run for one that is there.
    assert python.make_environment(["tiny-voice==1.0"], LABEL) == made[0]
    assert python.environment_python(["tiny-voice==2.0"]) != made[0]
    assert python.find_python(str(made[0]), LABEL).numpy == "1.0"


@pytest.mark.usefixtures("quick_venv")
def test_an_error_of_pip_is_shown_by_its_last_lines(index: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineStartError, match=r"No matching distribution found for tiny-voice==9\.9") as raised:
        python.make_environment(["tiny-voice==9.9"], LABEL)
    assert str(raised.value).startswith(f"{LABEL}: runtime.packages: ") and str(raised.value).count("\n") <= 6
    assert left_in(tmp_path / "cache") == []
    (index / "tiny_voice-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(PipelineStartError, match=r"tiny_voice-1\.0"):
        python.make_environment(["tiny-voice"], LABEL)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program that fills it at once, in place of uv."""
    uv = script(tmp_path / "uv", 'exec head -c 2000000 /dev/zero > "$5"')
    monkeypatch.setattr(python, "_find_uv", lambda: str(uv))
    with small_file_system(1 << 20) as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        with pytest.raises(PipelineStartError, match="packages has only 0 MiB of free space"):
            python.make_environment(["tiny-voice"], LABEL)
        assert left_in(folder) == []


def test_a_cache_that_cannot_be_made(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(PipelineStartError, match="make it writable, or set XDG_CACHE_HOME to another folder"):
        python.make_environment(["tiny-voice"], LABEL)


KILLED = """
import os, signal
from vllm_omni.stage import python
python._find_uv = lambda: None
def run(command, unfinished, where):
    (unfinished.path / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
python._run = run
python.make_environment(["tiny-voice"], "stage")
"""


@pytest.mark.usefixtures("quick_venv")
def test_a_kill_in_the_middle_leaves_nothing_for_long(index: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == -signal.SIGKILL and len(left_in(tmp_path / "cache")) == 1
    made = python.make_environment(["tiny-voice"], LABEL)
    assert left_in(tmp_path / "cache") == [made.parents[1].name] and made.exists()


UV = """
import json, os, shutil, subprocess, sys
with open(os.environ["UV_CALLS"], "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
if sys.argv[1] == "venv":
    shutil.copytree(os.environ["NEW_ENVIRONMENT"], sys.argv[5], symlinks=True)
else:
    subprocess.run([sys.argv[4], "-m", "pip", "install", *sys.argv[5:]], check=True)
"""


def test_uv_is_used_where_it_is(
    index: Path, new_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with the part of its command line that is used."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("UV_CALLS", str(calls))
    monkeypatch.setenv("NEW_ENVIRONMENT", str(new_environment))
    (tmp_path / "uv.py").write_text(UV)
    uv = script(tmp_path / "uv", f'exec "{sys.executable}" "{tmp_path}/uv.py" "$@"')
    monkeypatch.setattr(python, "_find_uv", lambda: str(uv))
    made = python.make_environment(["tiny-voice", "numpy>=1"], LABEL)
    assert made.exists()
    venv, install = (json.loads(line) for line in calls.read_text().splitlines())
    assert venv[:4] == ["venv", "--relocatable", "--python", sys.executable]
    assert install[:3] == ["pip", "install", "--python"] and install[4:] == ["tiny-voice", "numpy>=1"]
