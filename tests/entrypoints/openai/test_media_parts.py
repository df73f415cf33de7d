# SPDX-License-Identifier: Apache-2.0
"""Sounds and videos of messages: of any sample rate, silent, short, and more than a prompt has room for."""

import base64
import io
from typing import Any

import av
import httpx
import numpy as np
import pytest
import soundfile

from tests.servers import RunningServer

GROUP = "server"
TEXT = {"type": "text", "text": "What is it?"}


def sound(rate: int, channels: int) -> dict[str, Any]:
    """A second."""
    tone = 0.3 * np.sin(2 * np.pi * 300 * np.arange(rate) / rate)
    file = io.BytesIO()
    soundfile.write(file, np.stack([tone] * channels, axis=1), rate, format="WAV")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def video(num_frames: int) -> dict[str, Any]:
    """Two frames a second: all of them are read."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))
        for _ in range(num_frames):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return {"type": "video_url", "video_url": {"url": f"data:x/y;base64,{base64.b64encode(file.getvalue()).decode()}"}}


def ask(server: RunningServer, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [*parts, TEXT]}]
    body = {"messages": messages, "modalities": ["text"], "max_completion_tokens": 2, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def num_tokens(server: RunningServer, *parts: dict[str, Any], **fields: Any) -> int:
    """Of the prompt."""
    answer = ask(server, *parts, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    return answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (24_000, 1), (44_100, 2)])
def test_audio_of_any_sample_rate_is_read(omni_server: RunningServer, rate: int, channels: int) -> None:
    """A second has the same length at any rate; a resampler may drop the last sample."""
    expected = num_tokens(omni_server, sound(16_000, 1))
    assert abs(num_tokens(omni_server, sound(rate, channels)) - expected) <= 1


def test_media_with_more_tokens_than_the_context_are_refused_before_they_are_read(omni_server: RunningServer) -> None:
    for parts in ([video(400)], [video(20)] * 20):
        refused = ask(omni_server, *parts)
        assert refused.status_code == 400
        assert "more than 2048 tokens, which is the length of the model's context" in refused.text


def test_a_video_of_few_frames_is_read(omni_server: RunningServer) -> None:
    for num_frames in (1, 2, 3, 4):
        assert num_tokens(omni_server, video(num_frames))


def test_a_video_without_sound_is_silent_to_a_model_that_hears_videos(omni_server: RunningServer) -> None:
    heard = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    assert num_tokens(omni_server, video(1), **heard)
    assert num_tokens(omni_server, video(4), **heard) > num_tokens(omni_server, video(4))
