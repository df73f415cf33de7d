# SPDX-License-Identifier: Apache-2.0
"""Media that a model's prompt has no room for."""

import base64
import io
from typing import Any

import av
import httpx
import numpy as np

from tests.servers import RunningServer

GROUP = "server"
TEXT = {"type": "text", "text": "What is it?"}


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
    messages = [{"role": "user", "content": list(parts)}]
    body = {"messages": messages, "modalities": ["text"], "max_completion_tokens": 2, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def test_media_with_more_tokens_than_the_context_are_refused_before_they_are_read(omni_server: RunningServer) -> None:
    for parts in ([video(400)], [video(20)] * 20):
        refused = ask(omni_server, *parts, TEXT)
        assert refused.status_code == 400
        assert "more than 2048 tokens, which is the length of the model's context" in refused.text
    assert ask(omni_server, video(4), TEXT).status_code == 200


def test_a_video_of_one_frame_is_read(omni_server: RunningServer) -> None:
    for num_frames in (1, 2, 3):
        assert ask(omni_server, video(num_frames), TEXT).status_code == 200


def test_a_video_without_sound_is_silent_to_a_model_that_hears_videos(omni_server: RunningServer) -> None:
    heard = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    for num_frames in (1, 4):
        answer = ask(omni_server, video(num_frames), TEXT, **heard)
        assert answer.status_code == 200, answer.text
    seen = ask(omni_server, video(4), TEXT)
    assert answer.json()["usage"]["prompt_tokens"] > seen.json()["usage"]["prompt_tokens"]
