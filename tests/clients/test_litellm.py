# SPDX-License-Identifier: Apache-2.0
"""LiteLLM: its SDK, and its proxy in front of the server, which OpenAI's client asks."""

import base64
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.clients.running import ENVIRONMENT, KEY, PROGRAMS, SPOKEN, client_environment, run_program
from tests.clients.tasks import SENTENCE, Question, says, shows
from tests.servers import RunningServer, free_port
from vllm_omni.shapes.language import split_words

pytestmark = pytest.mark.slow

OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""The prices of models come from the package."""
PROXY_KEY = "sk-key-of-the-proxy"


def test_sdk(shapes_server: RunningServer, painter_server: RunningServer, question: Question, spoken: Path) -> None:
    arguments = (f"{painter_server.url}/v1", question.picture, question.text, spoken)
    result = run_program("litellm_sdk", shapes_server, *arguments, variables=OFFLINE)
    assert result["answer"] == "".join(result["pieces"]) == question.answer
    assert len(result["pieces"]) > 1
    assert says(result["spoken_answer"], question.answer)
    assert says(result["speech"], SENTENCE)
    assert split_words(result["transcript"]) == split_words(SPOKEN)
    assert shows(result["painting"], SENTENCE)


@pytest.fixture(scope="module")
def proxy(
    shapes_server: RunningServer, painter_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the proxy."""
    addresses = {"OMNI_URL": f"{shapes_server.url}/v1", "PAINTER_URL": f"{painter_server.url}/v1"}
    keys = {"OMNI_KEY": KEY, "PROXY_KEY": PROXY_KEY}
    port = free_port()
    log = tmp_path_factory.mktemp("proxy") / "log.txt"
    command = [
        "setpriv", "--pdeathsig=KILL", "--", str(ENVIRONMENT / "bin" / "litellm"),
        f"--config={PROGRAMS / 'litellm_proxy.yaml'}", "--host=127.0.0.1", f"--port={port}",
    ]  # fmt: skip
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            env={**client_environment(), **OFFLINE, **addresses, **keys},
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while not _is_alive(f"{url}/health/liveliness"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)  # There is no event for it.
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0)
        process.terminate()


def _is_alive(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


def test_proxy(proxy: openai.OpenAI, question: Question, spoken: Path) -> None:
    picture = "data:image/png;base64," + base64.b64encode(question.picture.read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question.text}]
    chat: Any = {"model": "shapes", "messages": [{"role": "user", "content": content}]}
    answer = (
        proxy.chat.completions.create(**chat, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})
        .choices[0]
        .message
    )
    assert answer.content == question.answer and answer.audio is not None
    assert says(answer.audio.data, question.answer)
    pieces = [chunk.choices[0].delta.content or "" for chunk in proxy.chat.completions.create(**chat, stream=True)]
    assert "".join(pieces) == question.answer and len(pieces) > 1

    assert says(proxy.audio.speech.create(model="tts-1", voice="alloy", input=SENTENCE).content, SENTENCE)
    transcript = proxy.audio.transcriptions.create(model="whisper-1", file=spoken).text
    assert split_words(transcript) == split_words(SPOKEN)
    (painting,) = proxy.images.generate(model="gpt-image-1", prompt=SENTENCE).data or []
    assert painting.b64_json is not None and shows(painting.b64_json, SENTENCE)
