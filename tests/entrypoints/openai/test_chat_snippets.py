# SPDX-License-Identifier: Apache-2.0
"""OpenAI's documented programs for chat with audio; only the model's name is replaced.

The client reads address and key from the environment.
"""

import base64
import wave
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.openai.test_openai_client import audio_file, name_of
from tests.servers import RunningServer

GROUP = "server"
SPOKEN_ANSWER = """
import base64
from openai import OpenAI

client = OpenAI()

completion = client.chat.completions.create(
    model="gpt-audio",
    modalities=["text", "audio"],
    audio={"voice": "alloy", "format": "wav"},
    messages=[
        {
            "role": "user",
            "content": "Is a golden retriever a good family dog?"
        }
    ]
)

print(completion.choices[0])

wav_bytes = base64.b64decode(completion.choices[0].message.audio.data)
with open("dog.wav", "wb") as f:
    f.write(wav_bytes)
"""

SPOKEN_QUESTION = """
completion = client.chat.completions.create(
    model="gpt-audio",
    modalities=["text", "audio"],
    audio={"voice": "alloy", "format": "wav"},
    messages=[
        {
            "role": "user",
            "content": [
                {
                    "type": "text",
                    "text": "What is in this recording?"
                },
                {
                    "type": "input_audio",
                    "input_audio": {
                        "data": encoded_string,
                        "format": "wav"
                    }
                }
            ]
        },
    ]
)

print(completion.choices[0].message)
"""

SEVERAL_TURNS = """
completion = client.chat.completions.create(
    model="gpt-audio",
    modalities=["text", "audio"],
    audio={"voice": "alloy", "format": "wav"},
    messages=[
        {
            "role": "user",
            "content": "Is a golden retriever a good family dog?"
        },
        {
            "role": "assistant",
            "audio": {
                "id": completion.choices[0].message.audio.id
            }
        },
        {
            "role": "user",
            "content": "Why do you say they are loyal?"
        }
    ],
)

print(completion.choices[0].message.audio.transcript)
"""

STREAMED = """
stream = client.chat.completions.create(
    model="gpt-audio",
    modalities=["text", "audio"],
    audio={"voice": "alloy", "format": "pcm16"},
    messages=[{"role": "user", "content": "Tell me a joke."}],
    stream=True,
)

pcm, transcript = b"", ""
for chunk in stream:
    delta = chunk.choices[0].delta
    if delta.audio:
        if delta.audio.transcript:
            transcript += delta.audio.transcript
        if delta.audio.data:
            pcm += base64.b64decode(delta.audio.data)
"""


def test_openais_programs_for_chat_with_audio(
    omni_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{omni_server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.chdir(tmp_path)
    program: dict[str, Any] = {"encoded_string": base64.b64encode(audio_file("wav")).decode()}

    def run(code: str) -> Any:
        exec(code.replace('"gpt-audio"', repr(name_of(omni_server.url))), program)
        return program["completion"].choices

    (choice,) = run(SPOKEN_ANSWER)
    with wave.open("dog.wav") as file:
        assert file.getframerate() == 24_000 and file.getnframes() > 0
    assert choice.message.audio.transcript == choice.message.content != ""

    (described,) = run(SPOKEN_QUESTION)
    assert described.message.audio.data and described.message.content != choice.message.content
    (later,) = run(SEVERAL_TURNS)
    assert later.message.audio.transcript and later.message.audio.id != described.message.audio.id

    run(STREAMED)
    assert program["transcript"] and len(program["pcm"]) > 0
