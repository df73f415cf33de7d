# SPDX-License-Identifier: Apache-2.0
"""Frameworks that speak OpenAI's protocol, unmodified, in the environment of `tests/clients`."""

import json
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.clients.running import ENVIRONMENT, client_environment, skip_without_clients
from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.media_apps import MODEL

GROUP = "app"
SCRIPTS = Path(__file__).parent / "clients"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["livekit_turns.py", "pipecat_turns.py"])
def test_two_turns(realtime_app: FastAPI, script: str) -> None:
    skip_without_clients()
    with over_http(realtime_app) as url:
        command = [str(ENVIRONMENT / "bin" / "python"), str(SCRIPTS / script), url, MODEL]
        run = subprocess.run(command, env=client_environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["errors"] == []
    assert all(turn["text"] and turn["seconds"] > 0.5 for turn in result["turns"]), result
