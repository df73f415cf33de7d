# SPDX-License-Identifier: Apache-2.0
"""The choices that `scripts/set_up.py` takes; that it installs is shown by the environment these tests run in."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TORCH = "torch==2.13.0+cpu"
NOT_FOUND = f"ERROR: No matching distribution found for {TORCH}\n"


@pytest.fixture
def set_up():
    """The script's functions, with a `pip_install` that answers from a list and remembers what it was asked."""
    names = runpy.run_path(str(SCRIPTS / "set_up.py"))
    namespace = names["main"].__globals__
    calls, answers = [], []

    def pip_install(python, *arguments):
        calls.append(arguments)
        return answers.pop(0)

    namespace["pip_install"] = pip_install
    return SimpleNamespace(**names, calls=calls, answers=answers, namespace=namespace)


def test_pip_alone_is_asked_when_it_finds_torch(set_up):
    set_up.answers.append(None)
    assert set_up.install_torch("python") == []
    assert set_up.calls == [("--no-deps", TORCH)]


def test_pytorchs_index_is_added_only_when_torch_is_not_found(set_up):
    set_up.answers += [NOT_FOUND, None]
    index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert set_up.install_torch("python") == index
    assert list(set_up.calls[1][-2:]) == index


def test_another_failure_of_pip_is_not_taken_for_a_missing_torch(set_up):
    set_up.answers.append("ERROR: Could not install packages due to an OSError: No space left on device\n")
    with pytest.raises(SystemExit, match="pip failed"):
        set_up.install_torch("python")
    assert len(set_up.calls) == 1


def test_a_torch_found_nowhere_says_where_it_was_looked_for(set_up):
    set_up.answers += [NOT_FOUND, NOT_FOUND]
    with pytest.raises(SystemExit, match="neither where pip is configured to look nor at https://download"):
        set_up.install_torch("python")


@pytest.mark.slow
def test_what_pip_says_is_returned_when_it_fails(capfd):
    pip_install = runpy.run_path(str(SCRIPTS / "set_up.py"))["pip_install"]
    said = pip_install(sys.executable, "--no-index", TORCH + ".1")
    assert f"No matching distribution found for {TORCH}.1" in said
    assert "No matching distribution" in capfd.readouterr().out
    assert pip_install(sys.executable, "--no-index", "pip") is None


def test_a_python_that_vllm_does_not_install_on_is_passed_over(set_up, monkeypatch):
    versions = {sys.executable: (3, 10), "/usr/bin/python3.14": None, "/usr/bin/python3.12": (3, 12)}
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    set_up.namespace["python_version"] = versions.get
    assert set_up.find_python() == "/usr/bin/python3.12"


def test_no_suitable_python_is_one_clear_error(set_up, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    set_up.namespace["python_version"] = lambda python: (3, 10)
    with pytest.raises(SystemExit, match=r"Python 3\.11 to 3\.14 only"):
        set_up.find_python()


def test_a_python_that_does_not_run_has_no_version(set_up, tmp_path):
    broken = tmp_path / "python"
    assert set_up.python_version(str(broken)) is None
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert set_up.python_version(str(broken)) is None
    assert set_up.python_version(sys.executable) == sys.version_info[:2]


def test_an_environment_that_runs_is_kept(set_up):
    assert set_up.make_venv(Path(sys.prefix)) == str(Path(sys.prefix) / "bin" / "python")
