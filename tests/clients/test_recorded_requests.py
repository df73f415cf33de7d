# SPDX-License-Identifier: Apache-2.0
"""Requests of clients that are programs with a form for their settings, or too large to install, as these send them.

Read in the sources of Open WebUI 0.12.4, n8n 2.41.3 (the node "OpenAI"), openai_tts 3.7 for Home Assistant, LibreChat,
AnythingLLM and SillyTavern.
"""

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import soundfile
from PIL import Image

from coloured_shapes.language import split_words
from tests.clients.running import KEY, SPOKEN
from tests.clients.tasks import SENTENCE, Question, says, shows
from tests.servers import RunningServer

pytestmark = pytest.mark.slow


def post(server: RunningServer, path: str, **arguments: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{server.url}/v1{path}", headers=headers, timeout=60, **arguments)
    assert answer.status_code == 200, answer.text
    return answer


def test_open_webui_lists_models_and_voices_without_the_key(shapes_server: RunningServer) -> None:
    models, voices = (
        httpx.get(f"{shapes_server.url}/v1/audio/{name}", timeout=60).raise_for_status().json()[name]
        for name in ("models", "voices")
    )
    assert [model["id"] for model in models] == ["shapes"]
    assert {voice["id"]: voice["name"] for voice in voices} == {"ada": "ada", "ben": "ben"}


TEXT = {"input": SENTENCE}
SPEECH = {
    "Open WebUI": {**TEXT, "voice": "ben", "model": "shapes"},
    "n8n": {**TEXT, "model": "tts-1", "voice": "alloy", "response_format": "mp3", "speed": 1},
    "Home Assistant": {
        **TEXT, "model": "tts-1", "voice": "shimmer", "response_format": "mp3", "speed": 1.0, "instructions": "Calmly.",
    },
    "Home Assistant, streamed": {**TEXT, "model": "tts-1", "voice": "shimmer", "response_format": "opus", "speed": 1.0},
    "SillyTavern": {**TEXT, "model": "tts-1", "voice": "nova", "response_format": "mp3", "speed": 1},
    "LibreChat": {**TEXT, "model": "shapes", "voice": "ada", "backend": "openai"},
    "AnythingLLM": {**TEXT, "model": "tts-1", "voice": "alloy"},
}  # fmt: skip


@pytest.mark.parametrize("client", SPEECH)
def test_speech(shapes_server: RunningServer, client: str) -> None:
    answer = post(shapes_server, "/audio/speech", json=SPEECH[client])
    kind = SPEECH[client].get("response_format", "mp3")
    assert answer.headers["content-type"] == {"mp3": "audio/mpeg", "opus": "audio/ogg"}[kind]
    assert says(answer.content, SENTENCE)


def test_librechat_joins_the_mp3_files_of_pieces(shapes_server: RunningServer) -> None:
    pieces = ("A red circle.", "A blue square.")
    request = SPEECH["LibreChat"]
    files = [post(shapes_server, "/audio/speech", json={**request, "input": piece}).content for piece in pieces]
    samples, _ = soundfile.read(io.BytesIO(b"".join(files)))
    assert len(samples) > 1.8 * len(soundfile.read(io.BytesIO(files[0]))[0])
    assert says(b"".join(files), " ".join(pieces))


TRANSCRIPTIONS: dict[str, dict[str, str]] = {
    "Open WebUI": {"model": "whisper-1", "language": "en"},
    "n8n": {"model": "whisper-1"},
    "LibreChat": {"model": "shapes"},
}


@pytest.mark.parametrize("client", TRANSCRIPTIONS)
def test_transcription(shapes_server: RunningServer, spoken: Path, client: str) -> None:
    files = {"file": (spoken.name, spoken.read_bytes())}
    answer = post(shapes_server, "/audio/transcriptions", data=TRANSCRIPTIONS[client], files=files)
    assert split_words(answer.json()["text"]) == split_words(SPOKEN)


IMAGES: dict[str, dict[str, Any]] = {
    "Open WebUI": {"model": "shapes-painter", "n": 1, "size": "96x96", "response_format": "b64_json"},
    "Open WebUI, auto": {"model": "gpt-image-1", "n": 1, "size": "auto"},
}


@pytest.mark.parametrize("client", IMAGES)
def test_image(painter_server: RunningServer, client: str) -> None:
    answer = post(painter_server, "/images/generations", json={"prompt": SENTENCE, **IMAGES[client]})
    (image,) = answer.json()["data"]
    assert shows(image["b64_json"], SENTENCE)


def test_n8n_paints_in_a_size_of_dall_e(painter_server: RunningServer) -> None:
    """Which is not one that `shapes-painter` was trained for."""
    request = {
        "model": "dall-e-2", "prompt": SENTENCE, "response_format": "b64_json", "size": "256x256",
        "quality": "standard", "style": "vivid",
    }  # fmt: skip
    (image,) = post(painter_server, "/images/generations", json=request).json()["data"]
    assert Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))).size == (256, 256)


@pytest.mark.parametrize("field", ["image", "image[]"])
def test_open_webui_edits_images(painter_server: RunningServer, question: Question, field: str) -> None:
    fields = {"model": "shapes-painter", "prompt": SENTENCE, "n": "1", "size": "96x96", "response_format": "b64_json"}
    files = {field: ("image.png", question.picture.read_bytes(), "image/png")}
    (image,) = post(painter_server, "/images/edits", data=fields, files=files).json()["data"]
    assert shows(image["b64_json"], SENTENCE)


def test_open_webui_chats(shapes_server: RunningServer) -> None:
    request = {
        "stream": True, "model": "shapes", "messages": [{"role": "user", "content": "Say: a red circle"}],
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    lines = post(shapes_server, "/chat/completions", json=request).text.split("\n\n")
    chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == "A red circle."
    assert chunks[-1]["usage"]["completion_tokens"] > 3
