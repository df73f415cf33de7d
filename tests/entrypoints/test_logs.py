# SPDX-License-Identifier: Apache-2.0
"""What a program that configures no logging prints, and a server from its start to its end, as their user sees it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.servers import SMALL_VLLM, RunningServer

pytestmark = pytest.mark.slow

PROGRAM = """
from vllm_omni import ARSegmentEvent, OmniLLM

with OmniLLM("shapes") as omni:
    (output,) = omni.chat([{"role": "user", "content": "Say: a red circle"}], use_tqdm=False, modalities=["text"])
print(output.outputs[0].text)
"""
TINY = """
import sys
from vllm_omni import OmniLLM

with OmniLLM(sys.argv[1], dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 24) as omni:
    (output,) = omni.generate("a hen", {"max_tokens": 2, "ignore_eos": True}, use_tqdm=False)
print(len(output.outputs[0].token_ids))
"""
LINE = r"INFO \d\d-\d\d \d\d:\d\d:\d\d "
STAGES = ("thinker", "talker", "code2wav")


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's shell: no variable about logging."""
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)


def run(folder: Path, program: str, *arguments: Path) -> tuple[str, str]:
    """Runs a program; returns its output and its log."""
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return result.stdout, result.stderr


def texts_of(log: str) -> list[str]:
    """Its lines, all of which have a time, without those of a slow machine."""
    lines = log.splitlines()
    assert all(re.match(LINE, line) for line in lines), log
    texts = [re.sub(LINE, "", line) for line in lines]
    return [text for text in texts if not text.startswith("still loading after ")]


def check_start(texts: list[str]) -> None:
    """One line for all stages, and one for each."""
    assert texts[0] == "starting stage 0 (thinker), stage 1 (talker), stage 2 (code2wav)"
    ready = sorted(re.sub(r"[\d.]+ s$", "", text) for text in texts[1:])
    assert ready == [f"stage {i} ({name}): ready after " for i, name in enumerate(STAGES)]


def test_a_program_has_one_line_for_each_stage(tmp_path: Path) -> None:
    out, log = run(tmp_path, PROGRAM)
    assert out == "A red circle.\n"
    check_start(texts_of(log.removeprefix("importing vLLM ...\n")))  # on a slow machine


def test_vllms_own_lines_are_a_variable_away(tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    out, log = run(tmp_path, TINY, tiny_qwen3)
    assert out == "2\n" and "Starting to load model" in log and "(text pid=" in log


def test_a_server_adds_addresses_and_requests(tmp_path: Path) -> None:
    server = RunningServer("shapes", log=tmp_path / "log.txt", wait=False)
    server.wait_until_ready()
    body = {"model": "shapes", "input": "A red circle.", "voice": "ada", "response_format": "wav"}
    assert httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=120).status_code == 200
    assert server.stop(signal.SIGINT) == 0
    start, _, after = server.output().partition("Application startup complete.\n")
    texts = texts_of(start)
    assert texts[0].startswith("vllm-omni ") and ": importing vLLM" in texts[0]
    check_start(texts[1:5])
    assert texts[5].startswith("Serving text, audio on http://127.0.0.1:")
    assert [text.split(maxsplit=1) for text in texts[6:9]] == [
        ["API", f"{server.url}/v1"],
        ["playground", "not served; add --playground"],
        ["docs", f"{server.url}/docs"],
    ]
    assert '"POST /v1/audio/speech HTTP/1.1" 200' in after and "/health" not in after  # which this test polls
    assert after.endswith("Application shutdown complete.\n")  # nothing of what libraries say about their own end


def test_vllms_own_lines_of_a_server_are_a_flag_away(tiny_qwen3: Path, tmp_path: Path) -> None:
    server = RunningServer(tiny_qwen3, *SMALL_VLLM, "--log-level=INFO", log=tmp_path / "log.txt")
    server.stop()
    output = server.output()
    assert "Starting to load model" in output and "Route: /v1/chat/completions" in output and "(text pid=" in output
