# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni` script and what vLLM hands over with `--omni`."""

import subprocess
import sys

import pytest

import vllm_omni
from vllm_omni.entrypoints.cli import main as cli


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `main()` on a command line; returns what it printed."""

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["vllm-omni", *arguments])
        cli.main()
        return capsys.readouterr().out

    return main


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_says_what_works_and_what_does_not(run, arguments):
    said = run(*arguments)
    assert "from vllm_omni import OmniLLM" in said
    assert "serve MODEL --omni     not in this version" in said


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version_names_both_packages(run, flag):
    assert run(flag).startswith(f"vllm-omni {vllm_omni.__version__} (vllm")


@pytest.mark.parametrize("arguments", [["serve", "MODEL", "--omni"], ["serve", "--omni", "--help"], ["--omni"]])
def test_serving_is_refused_with_the_way_that_works(run, arguments):
    with pytest.raises(SystemExit, match=r"does not serve over HTTP yet.*OmniLLM\(MODEL\)\.generate"):
        run(*arguments)


def test_everything_else_is_vllms(run, monkeypatch):
    import vllm.entrypoints.cli.main as vllm_cli

    seen = []
    monkeypatch.setattr(vllm_cli, "main", lambda: seen.append(sys.argv[1:]))
    run("serve", "MODEL", "--port", "8000")
    assert seen == [["serve", "MODEL", "--port", "8000"]]


def test_vllm_itself_hands_omni_to_us():
    """vLLM's own `vllm` script, not ours: the contract that a later server builds on."""
    code = (
        "import sys; sys.argv = ['vllm', 'serve', 'MODEL', '--omni']; import vllm.entrypoints.cli.main as m; m.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "vllm-omni: error:" in result.stderr and "Traceback" not in result.stderr


def test_a_missing_vllm_is_an_error_line_and_no_traceback(run, monkeypatch):
    from vllm_omni.errors import VllmRequirementError

    def refuse():
        raise VllmRequirementError("vllm_omni needs vLLM 0.32")

    monkeypatch.setattr(cli, "require_vllm", refuse)
    with pytest.raises(SystemExit, match=r"vllm-omni: error: vllm_omni needs vLLM 0\.32"):
        run("serve", "MODEL")
