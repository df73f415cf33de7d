# SPDX-License-Identifier: Apache-2.0
"""How tests run a program of `programs/`, which uses a client as its users do, in the environment of the clients."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.servers import RunningServer

KEY = "key-of-the-server"
SPOKEN = "a red circle is left of a blue square"
"""What the fixture `spoken` has a recording of."""
PROGRAMS = Path(__file__).with_name("programs")
ENVIRONMENT = Path(__file__).parents[2] / os.environ.get("CLIENTS_VENV", ".venv-clients")
"""Made by `make clients`."""
NPM = Path(__file__).with_name("npm")
"""The same, of packages for Node."""


def skip_without_clients() -> None:
    """Skips the test, and says what is missing."""
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip("needs the packages of tests/clients/requirements.txt (`make clients`)")


def client_environment() -> dict[str, str]:
    """Of a client's process: nothing of this environment's Python, no address or key of another service."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI_", "VIRTUAL_ENV"))
    }


def run_program(
    name: str,
    server: RunningServer,
    *arguments: object,
    model: str | None = None,
    environment: Path = ENVIRONMENT,
    variables: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> Any:
    """Runs `programs/NAME.py URL KEY MODEL ARGUMENTS`; returns the JSON in the last line that it prints.

    Args:
        arguments: After the server's address (which ends with /v1), key and model; files of the test, for example.
        model: Default: the name that the model is served under.
        variables: Of its environment, beside those of the test.
        timeout: Seconds, then it is killed.
    """
    command = [environment / "bin" / "python", PROGRAMS / f"{name}.py", f"{server.url}/v1", KEY, model or server.model]
    return _run([*command, *arguments], variables or {}, timeout)


def run_node_program(name: str, server: RunningServer, *arguments: object, timeout: float = 240) -> Any:
    """The same for `npm/NAME.mjs`."""
    command = ["node", NPM / f"{name}.mjs", f"{server.url}/v1", KEY, server.model]
    return _run([*command, *arguments], {}, timeout)


def _run(command: Sequence[object], variables: Mapping[str, str], timeout: float) -> Any:
    name = Path(str(command[1])).name
    arguments = ["setpriv", "--pdeathsig=KILL", "--", *map(str, command)]
    env = {**client_environment(), **variables}
    try:
        result = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{name} has not ended after {timeout} s:\n{_text(error.stdout)}{_text(error.stderr)}")
    assert result.returncode == 0, f"{name} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
    sys.stderr.write(result.stderr)  # pytest shows it if the test fails.
    return json.loads(result.stdout.splitlines()[-1])


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
