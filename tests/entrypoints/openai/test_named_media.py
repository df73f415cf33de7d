# SPDX-License-Identifier: Apache-2.0
"""Media of a pipeline's call by their names over HTTP: the fields of a dataclass, and sounds."""

import asyncio
import base64
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import openai
import pytest
from fastapi import FastAPI
from PIL import Image

from tests.diffusion.tiny_calls import make_image
from tests.diffusion.tiny_pipelines import build
from tests.entrypoints.openai.media_apps import send, serving, use
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.media_request import is_image
from vllm_omni.events import CompletedEvent
from vllm_omni.outputs import OmniRequestOutput

SETTINGS: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 7, "num_frames": 9}
ARGUMENTS: dict[str, Any] = {"stg_scale": 0.0, "audio_stg_scale": 0.0, "max_sequence_length": 64}
FRAMES = [make_image(seed, 64, 64) for seed in range(2)]


def as_file(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


FILES = [as_file(frame) for frame in FRAMES]
URIS = ["data:image/png;base64," + base64.b64encode(file).decode() for file in FILES]
CONDITIONS = [{"frames": URIS[0]}, {"frames": {"image_url": {"url": URIS[1]}}, "index": -1, "strength": 0.8}]


async def made(llm: AsyncOmniLLM, prompt: Any, params: dict[str, Any]) -> OmniRequestOutput:
    events = [event async for event in llm.generate(prompt, params)]
    assert isinstance(events[-1], CompletedEvent), events[-1]
    return events[-1].outputs[0]


@pytest.fixture(scope="module")
def video_app(tmp_path_factory: pytest.TempPathFactory, tiny_diffusion: Callable[[str], Path]) -> Iterator[FastAPI]:
    folder = tmp_path_factory.mktemp("ltx2")
    build("LTX2ConditionPipeline", tiny_diffusion).save_pretrained(folder)
    with serving(folder, max_frames=16) as app:
        yield app


def request_video(app: FastAPI, **request: Any) -> bytes:
    """The file of a video that is requested as JSON, or as a form."""

    async def main(client: openai.AsyncOpenAI) -> bytes:
        answer = await client._client.request("POST", "/v1/videos", **request)
        assert answer.status_code == 200, answer.text
        video = await client.videos.poll(answer.json()["id"], poll_interval_ms=50)
        assert video.status == "completed", video
        return (await client.videos.download_content(video.id)).content

    return use(app, main)


@contextmanager
def recorded(llm: AsyncOmniLLM) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """The prompts of this block's requests, and the parameters of their stage."""
    requests, generate = [], llm.generate

    def record(prompt: Any, params: list[Any], *args: Any, **options: Any) -> Any:
        requests.append((prompt, params[0]))
        return generate(prompt, params, *args, **options)

    with mock.patch.object(llm, "generate", record):
        yield requests


@pytest.mark.slow
def test_conditions_are_objects_with_media(video_app: FastAPI) -> None:
    """Each request has the frames of the same one offline, before they are encoded: two files of the same frames may
    differ."""
    llm: AsyncOmniLLM = video_app.state.engine_client.llm

    def frames(prompt: Any, params: dict[str, Any]) -> np.ndarray:
        (video,) = asyncio.run(made(llm, prompt, {**params, "output_format": "np"})).videos
        return video

    media = [{"frames": FRAMES[0]}, {"frames": FRAMES[1], "index": -1, "strength": 0.8}]
    params = {**SETTINGS, "extra_args": ARGUMENTS}
    expected = frames({"prompt": "a boat", "multi_modal_data": {"conditions": media}}, params)
    assert np.abs(frames({"prompt": "a boat"}, params) - expected).mean() > 0.05

    body = {"prompt": "a boat", **SETTINGS, "extra_args": ARGUMENTS}
    fields = {**SETTINGS, "prompt": "a boat", **{f"extra_args[{name}]": value for name, value in ARGUMENTS.items()}}
    parts = {"conditions[1][index]": -1, "inputs[conditions][1][strength]": 0.8}
    files = {f"conditions[{i}][frames]": (f"{i}.png", file) for i, file in enumerate(FILES)}
    for request in (
        {"json": {**body, "conditions": CONDITIONS}},
        {"json": {**body, "inputs": {"conditions": CONDITIONS}}},
        {"data": {**fields, **parts}, "files": files},
        {"data": {**fields, "conditions": json.dumps(CONDITIONS)}},
    ):
        with recorded(llm) as requests:
            assert b"ftyp" in request_video(video_app, **request)[:12]
        ((prompt, settings),) = requests
        assert settings["output_format"] == "mp4"
        assert np.abs(frames(prompt, settings) - expected).max() < 1e-4, [*request]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ([{"frames": URIS[0], "place": 1}], "LTX2VideoCondition has no 'place'"),
        ([{"index": 0}], "LTX2VideoCondition needs frames"),
        ([{"frames": URIS[0], "index": "first"}], "conditions: index: Expected `int`"),
        ([{"frames": {"place": 1}}], "conditions.frames must be a data URI"),
        ([{"frames": "data:image/png;base64,AAAA"}], "image"),
        (URIS[:1], "conditions is an object with frames, index, strength"),
        ([{"frames": URIS[0]}] * 17, "at most 16"),
        ([], "at least 1"),
    ],
)
def test_wrong_conditions_are_named(video_app: FastAPI, conditions: list[Any], words: str) -> None:
    answer = send(video_app, "POST", "/v1/videos", json={"prompt": "a boat", **SETTINGS, "conditions": conditions})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_a_picture_is_told_from_a_video() -> None:
    octets = "data:application/octet-stream;base64,"
    pictures = {name: io.BytesIO() for name in ("png", "jpeg", "webp", "gif", "tiff", "bmp")}
    for name, file in pictures.items():
        FRAMES[0].save(file, name)
        assert is_image(octets + base64.b64encode(file.getvalue()).decode()), name
    assert is_image(URIS[0]) and is_image("https://example.com/a.jpg?size=2")
    others = (
        octets + base64.b64encode(b"\0\0\0\x20ftypisom").decode(),
        "data:video/mp4;base64,AAAA",
        "https://a.com/b.mp4",
    )
    assert not any(map(is_image, (*others, octets + "*")))
