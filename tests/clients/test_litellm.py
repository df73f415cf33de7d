# SPDX-License-Identifier: Apache-2.0
"""LiteLLM: its SDK, and its proxy in front of the server, which OpenAI's client asks."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from coloured_shapes.language import split_words
from tests.clients.running import ENVIRONMENT, KEY, PROGRAMS, SPOKEN, client_environment, run_program
from tests.clients.tasks import SENTENCE, Question, says, shows
from tests.servers import RunningServer, answers, free_port, running_program

pytestmark = pytest.mark.slow

OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""The prices of models come from the package."""
PROXY_KEY = "sk-key-of-the-proxy"


def test_sdk(shapes_server: RunningServer, painter_server: RunningServer, question: Question, spoken: Path) -> None:
    arguments = (f"{painter_server.url}/v1", question.picture, question.text, spoken)
    result = run_program("litellm_sdk", shapes_server, *arguments, variables=OFFLINE)
    assert result["answer"] == "".join(result["pieces"]) == question.answer
    assert len(result["pieces"]) > 1
    assert result["response"] == "".join(result["deltas"]) == question.answer
    assert result["message"] == "".join(result["parts"]) == question.answer
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
    url = f"http://127.0.0.1:{port}"
    config = PROGRAMS / "litellm_proxy.yaml"
    command = [ENVIRONMENT / "bin" / "litellm", f"--config={config}", "--host=127.0.0.1", f"--port={port}"]
    env = {**client_environment(), **OFFLINE, **addresses, **keys}
    with running_program(command, lambda: answers(f"{url}/health/liveliness"), log, env=env):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0)


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
