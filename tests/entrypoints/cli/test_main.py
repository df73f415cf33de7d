# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni` script and what vLLM hands over with `--omni`."""

import subprocess
import sys

import pytest

import vllm_omni
from vllm_omni.entrypoints.cli import main as cli


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], [], ["--omni"]])
def test_help_names_the_commands(run, arguments):
    result = run(*arguments)
    assert result.code == 0
    for command in (
        "serve MODEL",
        "config show MODEL",
        "bench serve",
        "demo [FOLDER]",
        "doctor [MODEL]",
        "from vllm_omni import OmniLLM",
    ):
        assert command in result.out


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version_names_both_packages(run, flag):
    assert run(flag).out.startswith(f"vllm-omni {vllm_omni.__version__} (vllm")


def test_other_commands_are_vllms(run, monkeypatch):
    import vllm.entrypoints.cli.main as vllm_cli

    seen = []
    monkeypatch.setattr(vllm_cli, "main", lambda: seen.append(sys.argv[1:]))
    run("chat", "--url", "http://localhost")
    assert seen == [["chat", "--url", "http://localhost"]]


def test_omni_is_refused_where_it_means_nothing(run):
    result = run("chat", "--omni")
    assert result.code == 2
    assert "--omni is for serve, config, bench, demo, playground, doctor; leave it out for chat" in result.err
    result = run("bench", "latency", "--omni")
    assert result.code == 2
    assert "--omni is for bench serve; leave it out for the other benchmarks" in result.err


@pytest.mark.slow
def test_vllm_itself_hands_omni_to_us():
    """vLLM's own `vllm` script, not ours."""
    code = "import sys; sys.argv = ['vllm', 'bench', '--omni']; import vllm.entrypoints.cli.main as m; m.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "vllm-omni: error: --omni is for bench serve" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["serve", "MODEL"], ["config", "show", "MODEL"], ["chat"]])
def test_a_missing_vllm_is_an_error_line_and_no_traceback(run, monkeypatch, command):
    from vllm_omni.errors import VllmRequirementError

    def refuse():
        raise VllmRequirementError("vllm_omni needs vLLM 0.32")

    monkeypatch.setattr(cli, "require_vllm", refuse)
    result = run(*command)
    assert (result.code, result.err) == (1, "vllm-omni: error: vllm_omni needs vLLM 0.32\n")
