# SPDX-License-Identifier: Apache-2.0
"""A model of stereo audio: every endpoint with audio returns both channels."""

import asyncio
import base64
import io
import wave
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.media_apps import MODEL, serving, use
from vllm_omni.events import CompletedEvent

PROMPT = "A calm piano."
SETTINGS = {"num_inference_steps": 2, "seed": 7}
SHORT = {"0": {"default_sampling_params": {"extra_args": {"audio_duration": 0.4}}}}
RATE = 48_000


@pytest.fixture(scope="module")
def app(tiny_diffusion: Callable[[str], Path]) -> Iterator[FastAPI]:
    with serving(tiny_diffusion("ace_step"), stage_overrides=SHORT) as app:
        yield app


@pytest.fixture(scope="module")
def expected(app: FastAPI) -> np.ndarray:
    """float32 `[2, n]`: what the pipeline makes, of which no channel is the other."""

    async def main() -> np.ndarray:
        prompt = {"prompt": PROMPT, "modalities": ["audio"]}
        async with aclosing(app.state.engine_client.run(prompt, [SETTINGS], stream=False)) as events:
            (end,) = [event async for event in events if isinstance(event, CompletedEvent)]
        return end.outputs[0].multimodal_output["audio"][0].numpy()

    samples = asyncio.run(main())
    assert len(samples) == 2 and np.abs(samples[0] - samples[1]).max() > 0.01
    return np.clip(samples, -1, 1)


def check_wav(data: bytes, expected: np.ndarray) -> None:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (RATE, 2, expected.shape[1])
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2).T / 32768
    np.testing.assert_allclose(samples, expected, atol=1 / 32768)


def test_a_file_of_the_speech_endpoint(app: FastAPI, expected: np.ndarray) -> None:
    async def main(client: openai.AsyncOpenAI) -> Any:
        return await client.audio.speech.create(
            model=MODEL,
            voice="coral",
            input=PROMPT,
            instructions="Slowly.",
            response_format="wav",
            extra_body={"sampling_params_list": [SETTINGS]},
        )

    check_wav(use(app, main).content, expected)


def test_an_answer_in_chat(app: FastAPI, expected: np.ndarray) -> None:
    async def main(client: openai.AsyncOpenAI) -> Any:
        messages: Any = [{"role": "user", "content": PROMPT}]
        return await client.chat.completions.create(model=MODEL, messages=messages, extra_body={"extra_body": SETTINGS})

    check_wav(base64.b64decode(use(app, main).choices[0].message.audio.data), expected)
