# SPDX-License-Identifier: Apache-2.0
"""What a server prints from its start to its end, as its user sees it."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.servers import RunningServer

pytestmark = pytest.mark.slow

LINE = r"INFO \d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's shell: no variable about logging."""
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)


def speak(server: RunningServer) -> None:
    body = {"model": "shapes", "input": "A red circle.", "voice": "ada", "response_format": "wav"}
    assert httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=120).status_code == 200


def test_one_line_for_each_stage_then_addresses_and_requests(tmp_path: Path, without_settings: None) -> None:
    server = RunningServer("shapes", log=tmp_path / "log.txt", wait=False)
    server.wait_until_ready()
    speak(server)
    assert server.stop(signal.SIGINT) == 0
    output = server.output()
    start, _, after = output.partition("Application startup complete.\n")
    lines = start.splitlines()
    assert all(re.match(LINE, line) for line in lines), output
    texts = [re.sub(LINE, "", line) for line in lines]
    texts = [text for text in texts if not text.startswith("still loading after ")]  # on a slow machine
    assert texts[0].startswith("vllm-omni ") and ": importing vLLM" in texts[0]
    assert texts[1] == "starting stage 0 (thinker), stage 1 (talker), stage 2 (code2wav)"
    ready = sorted(re.sub(r"[\d.]+ s$", "", text) for text in texts[2:5])
    assert ready == [f"stage {i} ({name}): ready after " for i, name in enumerate(("thinker", "talker", "code2wav"))]
    assert texts[5].startswith("Serving text, audio on http://127.0.0.1:")
    assert [text.split(maxsplit=1) for text in texts[6:9]] == [
        ["API", f"{server.url}/v1"],
        ["playground", "not served; add --playground"],
        ["docs", f"{server.url}/docs"],
    ]
    assert '"POST /v1/audio/speech HTTP/1.1" 200' in after and "/health" not in after  # which this test polls
    assert after.endswith("Application shutdown complete.\n")  # nothing of what libraries say about their own end


def test_vllms_own_lines_are_a_flag_away(tmp_path: Path, without_settings: None) -> None:
    server = RunningServer("shapes", "--log-level=INFO", log=tmp_path / "log.txt", wait=False)
    server.wait_until_ready()
    server.stop()
    output = server.output()
    assert "Starting to load model" in output and "Route: /v1/chat/completions" in output and "(thinker pid=" in output
