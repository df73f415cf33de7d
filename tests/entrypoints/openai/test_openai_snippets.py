# SPDX-License-Identifier: Apache-2.0
"""OpenAI's documented programs for speech, chat with audio, images and videos; only server and model are replaced.

The address and the key come from the environment, as OpenAI's client has it, where a program makes its client.
"""

import base64
import io
import runpy
import shutil
import subprocess
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import openai
import pytest
from openai.types import (
    ImageEditCompletedEvent,
    ImageEditPartialImageEvent,
    ImageGenCompletedEvent,
    ImageGenPartialImageEvent,
    ImagesResponse,
    Video,
)
from PIL import Image
from pydantic import BaseModel

from tests.entrypoints.openai.media_apps import png
from tests.entrypoints.openai.test_audio_formats import decode
from tests.entrypoints.openai.test_openai_client import audio_file
from tests.servers import RunningServer

GROUP = "server"
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")

TO_A_FILE = """
from pathlib import Path
from openai import OpenAI

client = OpenAI()
speech_file_path = Path(__file__).parent / "speech.mp3"

with client.audio.speech.with_streaming_response.create(
    model="gpt-4o-mini-tts",
    voice="coral",
    input="Today is a wonderful day to build something people love!",
    instructions="Speak in a cheerful and positive tone.",
) as response:
    response.stream_to_file(speech_file_path)
"""
TO_A_FILE_WITHOUT_A_CLIENT = """
from pathlib import Path
import openai

speech_file_path = Path(__file__).parent / "speech.mp3"
with openai.audio.speech.with_streaming_response.create(
    model="gpt-4o-mini-tts",
    voice="alloy",
    input="The quick brown fox jumped over the lazy dog."
) as response:
    response.stream_to_file(speech_file_path)
"""
TO_A_FILE_AT_ONCE = """
from openai import OpenAI
from pathlib import Path

client = OpenAI()

response = client.audio.speech.create(
    model="gpt-4o-mini-tts",
    voice="nova",
    input="Hello world! This is a streaming test.",
)
response.write_to_file(Path(__file__).parent / "speech.mp3")
"""
TO_THE_SPEAKER = """
import asyncio

from openai import AsyncOpenAI
from openai.helpers import LocalAudioPlayer

openai = AsyncOpenAI()

async def main() -> None:
    async with openai.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts",
        voice="coral",
        input="Today is a wonderful day to build something people love!",
        instructions="Speak in a cheerful and positive tone.",
        response_format="pcm",
    ) as response:
        await LocalAudioPlayer().play(response)

if __name__ == "__main__":
    asyncio.run(main())
"""
AS_EVENTS = """
from openai import OpenAI

client = OpenAI()

with client.audio.speech.with_streaming_response.create(
    model="gpt-4o-mini-tts",
    voice="coral",
    input="Today is a wonderful day to build something people love!",
    response_format="pcm",
    stream_format="sse",
) as response:
    lines = list(response.iter_lines())
"""
WITH_CURL = """
curl https://api.openai.com/v1/audio/speech \\
  -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "gpt-4o-mini-tts",
    "input": "Today is a wonderful day to build something people love!",
    "voice": "coral",
    "instructions": "Speak in a cheerful and positive tone."
  }' \\
  --output speech.mp3
"""
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


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(omni_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs programs as one script in the folder; its variables. Arguments are variables that it has."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{omni_server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(openai, "_client", None)  # `openai.audio` uses a client that keeps its address.

    def run(*programs: str, **variables: Any) -> dict[str, Any]:
        script = Path.cwd() / "snippet.py"
        program = "\n".join(programs)
        for model in ("gpt-4o-mini-tts", "gpt-audio"):
            program = program.replace(model, omni_server.model)
        script.write_text(program)
        return runpy.run_path(str(script), variables, run_name="__main__")

    return run


def test_chat_with_audio(run: Callable[..., dict[str, Any]]) -> None:
    variables = {"encoded_string": base64.b64encode(audio_file("wav")).decode()}
    kept = ("answer = completion.choices[0]", "described = completion.choices[0]")
    made = run(SPOKEN_ANSWER, kept[0], SPOKEN_QUESTION, kept[1], SEVERAL_TURNS, STREAMED, **variables)
    answer, described, (later,) = made["answer"], made["described"], made["completion"].choices
    with wave.open("dog.wav") as file:
        assert file.getframerate() == 24_000 and file.getnframes() > 0
    assert answer.message.audio.transcript == answer.message.content != ""
    assert described.message.audio.data and described.message.content != answer.message.content
    assert later.message.audio.transcript and later.message.audio.id != described.message.audio.id
    assert made["transcript"] and len(made["pcm"]) > 0


def check_mp3() -> None:
    samples, rate = decode(Path("speech.mp3").read_bytes())
    assert rate == 24000 and len(samples) > 0 and np.abs(samples).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("program", [TO_A_FILE, TO_A_FILE_WITHOUT_A_CLIENT, TO_A_FILE_AT_ONCE])
def test_speech_to_a_file(run: Callable[..., Any], program: str) -> None:
    run(program)
    check_mp3()


class Speaker:
    """In place of sounddevice's `OutputStream`: plays at once, and keeps the samples."""

    def __init__(self) -> None:
        self.samples: list[np.ndarray] = []

    def __call__(self, *, samplerate: int, channels: int, dtype: Any, callback: Callable[..., None]) -> "Speaker":
        self.rate, self._shape, self._dtype, self._callback = samplerate, (1024, channels), dtype, callback
        return self

    def __enter__(self) -> None:
        try:
            while True:
                block = np.zeros(self._shape, self._dtype)
                self._callback(block, len(block), None, None)
                self.samples.append(block)
        except StopIteration:
            pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_to_the_speaker(run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Speaker()
    sounddevice = SimpleNamespace(OutputStream=speaker, CallbackStop=StopIteration)
    monkeypatch.setitem(sys.modules, "sounddevice", sounddevice)  # type: ignore[arg-type]
    run(TO_THE_SPEAKER)
    played = np.concatenate(speaker.samples)
    assert speaker.rate == 24000 and played.shape[1] == 1 and 0 < np.abs(played).max() <= 1


@pytest.mark.slow
def test_as_events(run: Callable[[str], Any]) -> None:
    lines = [line for line in run(AS_EVENTS)["lines"] if line]
    assert all(line.startswith('data: {"type":"speech.audio.delta","audio":"') for line in lines[:-1])
    assert lines[-1].startswith('data: {"type":"speech.audio.done",') and '"usage":{"input_tokens":' in lines[-1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_with_curl(omni_server: RunningServer) -> None:
    command = WITH_CURL.replace("https://api.openai.com", omni_server.url).replace("gpt-4o-mini-tts", omni_server.model)
    subprocess.run(["bash", "-c", command], env={"OPENAI_API_KEY": "none"}, check=True)
    check_mp3()


def check_fields(answer: Any, expected: type[BaseModel]) -> None:
    """Validates an answer, which OpenAI's client does not, for the required fields."""
    assert isinstance(answer, expected)
    for name, field in expected.model_fields.items():
        value = getattr(answer, name)
        assert value is not None or not field.is_required(), name
        if isinstance(value, BaseModel):
            check_fields(value, type(value))


@pytest.mark.slow
class TestImages:
    @pytest.fixture
    def client(self, image_server: RunningServer) -> openai.OpenAI:
        return image_server.openai()

    @pytest.fixture
    def model(self, image_server: RunningServer) -> str:
        return image_server.model

    def test_generate(self, client: openai.OpenAI, model: str) -> None:
        prompt = """
        A children's book drawing of a veterinarian using a stethoscope to
        listen to the heartbeat of a baby otter.
        """

        result = client.images.generate(
            model=model,
            prompt=prompt,
        )

        image_base64 = result.data[0].b64_json
        image_bytes = base64.b64decode(image_base64)

        # Save the image to a file
        with open("otter.png", "wb") as f:
            f.write(image_bytes)

        check_fields(result, ImagesResponse)
        assert Image.open("otter.png").size == (1024, 1024)

    def test_options(self, client: openai.OpenAI, model: str) -> None:
        img = client.images.generate(
            model=model,
            prompt="A cute baby sea otter",
            n=1,
            size="1024x1024",
            quality="high",
            background="opaque",
            moderation="low",
            output_format="jpeg",
            output_compression=50,
            user="user-1234",
        )

        image_bytes = base64.b64decode(img.data[0].b64_json)
        with open("output.jpeg", "wb") as f:
            f.write(image_bytes)

        check_fields(img, ImagesResponse)
        assert (img.output_format, img.size, img.background) == ("jpeg", "1024x1024", "opaque")
        assert Image.open("output.jpeg").format == "JPEG"

    def test_stream(self, client: openai.OpenAI, model: str) -> None:
        stream = client.images.generate(
            prompt="Draw a gorgeous image of a river made of white owl feathers",
            model=model,
            stream=True,
            partial_images=2,
        )

        for event in stream:
            if event.type == "image_generation.partial_image":
                idx = event.partial_image_index
                image_base64 = event.b64_json
                image_bytes = base64.b64decode(image_base64)
                with open(f"river{idx}.png", "wb") as f:
                    f.write(image_bytes)
                check_fields(event, ImageGenPartialImageEvent)

        assert event.type == "image_generation.completed"
        check_fields(event, ImageGenCompletedEvent)
        assert [Image.open(f"river{i}.png").format for i in range(2)] == ["PNG", "PNG"]

    def test_edit(self, client: openai.OpenAI, model: str) -> None:
        Path("body-lotion.png").write_bytes(png())
        prompt = """
        Generate a photorealistic image of a gift basket on a white background.
        """

        result = client.images.edit(
            model=model,
            image=[
                open("body-lotion.png", "rb"),  # noqa: SIM115 (as the documentation has it)
            ],
            prompt=prompt,
        )

        image_base64 = result.data[0].b64_json
        image_bytes = base64.b64decode(image_base64)
        with open("gift-basket.png", "wb") as f:
            f.write(image_bytes)

        check_fields(result, ImagesResponse)
        assert Image.open("gift-basket.png").format == "PNG"

    def test_edit_with_options_as_a_stream(self, client: openai.OpenAI, model: str) -> None:
        Path("sunlit_lounge.png").write_bytes(png())

        stream = client.images.edit(
            model=model,
            image=open("sunlit_lounge.png", "rb"),  # noqa: SIM115
            prompt="A sunlit indoor lounge area with a pool",
            input_fidelity="high",
            stream=True,
            partial_images=1,
        )

        *partial, completed = list(stream)
        for event in partial:
            check_fields(event, ImageEditPartialImageEvent)
        check_fields(completed, ImageEditCompletedEvent)
        assert Image.open(io.BytesIO(base64.b64decode(completed.b64_json))).format == "PNG"


@pytest.mark.slow
class TestVideos:
    @pytest.fixture
    def client(self, video_server: RunningServer) -> openai.OpenAI:
        return video_server.openai()

    @pytest.fixture
    def model(self, video_server: RunningServer) -> str:
        return video_server.model

    def test_create_and_download(self, client: openai.OpenAI, model: str) -> None:
        video = client.videos.create(
            model=model,
            prompt="A video of a cool cat on a motorcycle in the night",
        )
        check_fields(video, Video)

        progress = getattr(video, "progress", 0)
        while video.status in ("in_progress", "queued"):
            # Refresh status
            video = client.videos.retrieve(video.id)
            progress = getattr(video, "progress", 0)
            time.sleep(0.1)

        assert video.status == "completed" and progress == 100
        check_fields(video, Video)
        assert (video.size, video.seconds) == ("32x32", "0.3125")

        content = client.videos.download_content(video.id, variant="video")
        content.write_to_file("video.mp4")

        with av.open("video.mp4") as container:
            assert sum(1 for _ in container.decode(video=0)) == 5
        client.videos.delete(video.id)

    def test_create_and_poll_remix_list_and_delete(self, client: openai.OpenAI, model: str) -> None:
        video = client.videos.create_and_poll(
            model=model,
            prompt="A video of a cat on a motorcycle",
        )
        assert video.status == "completed"

        remixed = client.videos.remix(
            video_id=video.id,
            prompt="Extend the scene with the cat taking a bow to the cheering audience",
        )
        check_fields(remixed, Video)
        assert remixed.remixed_from_video_id == video.id
        remixed = client.videos.poll(remixed.id)
        assert remixed.status == "completed"

        own = {video.id, remixed.id}  # Other tests make videos on this server, too.
        page = [made for made in client.videos.list() if made.id in own]
        assert [made.id for made in page] == [remixed.id, video.id]
        for made in page:
            deleted = client.videos.delete(made.id)
            assert deleted.deleted and deleted.id == made.id
        assert own.isdisjoint(made.id for made in client.videos.list())
