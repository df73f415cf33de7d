# SPDX-License-Identifier: Apache-2.0
"""Runs command lines in this process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from vllm_omni.entrypoints.cli import main as cli


@dataclass(frozen=True)
class Said:
    """What a command line printed, and how it ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `vllm-omni` with these words."""

    def main(*arguments: object) -> Said:
        # Commands set these for themselves; other tests shall not see it.
        for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
            monkeypatch.setenv(name, {"VLLM_LOGGING_LEVEL": "WARNING"}.get(name, "ext://sys.stderr"))
        monkeypatch.setattr(cli, "start_fork_server", lambda: None)  # Nothing is forked here.
        monkeypatch.setattr(sys, "argv", ["vllm-omni", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return main
