# SPDX-License-Identifier: Apache-2.0
"""Runs commands in this process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.entrypoints import omni_base
from vllm_omni.entrypoints.cli import main as cli


@dataclass(frozen=True)
class CommandResult:
    """The output and exit code of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., CommandResult]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `vllm-omni` with arguments."""

    def main(*arguments: object) -> CommandResult:
        # Commands set these; the fixture restores them for other tests.
        for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
            monkeypatch.setenv(name, {"VLLM_LOGGING_LEVEL": "WARNING"}.get(name, "ext://sys.stderr"))
        monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)  # It stays after a `--help=KEYWORD`.
        monkeypatch.setattr(omni_base, "start_fork_server", lambda **options: None)  # no stage is started
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # vLLM's own commands get a finder.
        monkeypatch.setattr(sys, "argv", ["vllm-omni", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        printed = capsys.readouterr()
        return CommandResult(code, printed.out, printed.err)

    return main
