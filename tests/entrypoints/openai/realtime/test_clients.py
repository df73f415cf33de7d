# SPDX-License-Identifier: Apache-2.0
"""Frameworks that speak OpenAI's protocol, unmodified, in an environment of their own, because pipecat pins packages.

python -m venv clients && clients/bin/pip install -r tests/entrypoints/openai/realtime/clients/requirements.txt
OMNI_REALTIME_CLIENTS=clients/bin/python python -m pytest -m slow tests/entrypoints/openai/realtime/test_clients.py
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.media_apps import MODEL

SCRIPTS = Path(__file__).parent / "clients"
PYTHON = os.environ.get("OMNI_REALTIME_CLIENTS")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="OMNI_REALTIME_CLIENTS names no Python with the clients, see the file")
@pytest.mark.parametrize("script", ["livekit_turns.py", "pipecat_turns.py"])
def test_two_turns(realtime_app: FastAPI, script: str) -> None:
    with over_http(realtime_app) as url:
        command = [str(PYTHON), str(SCRIPTS / script), url, MODEL]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["errors"] == []
    assert all(turn["text"] and turn["seconds"] > 0.5 for turn in result["turns"]), result
