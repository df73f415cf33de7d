# SPDX-License-Identifier: Apache-2.0
"""GET /v1/pipeline, and the times of one request."""

from typing import Any

import openai
import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.media_apps import MODEL, send, use
from vllm_omni.entrypoints.openai import engine_client
from vllm_omni.entrypoints.openai.engine_client import RecentRequest, RecentRequests

GROUP = "llm"


def test_an_omni_model(omni_app: FastAPI) -> None:
    answer = send(omni_app, "GET", "/v1/pipeline").json()
    assert (answer["model"], answer["inputs"]) == (MODEL, ["text", "image", "audio", "video"])
    assert (answer["outputs"], answer["voices"]) == (["text", "audio"], ["ethan", "aiden", "chelsie"])
    assert answer["endpoints"] == [
        "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/audio/speech", "/v1/audio/speech/stream",
        "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime",
    ]  # fmt: skip
    stages = [(stage["name"], stage["kind"], stage["output"]) for stage in answer["stages"]]
    assert stages == [("thinker", "AR", "text"), ("talker", "AR", None), ("code2wav", "generation", "audio")]


def test_an_image_model(image_app: FastAPI) -> None:
    answer = send(image_app, "GET", "/v1/pipeline").json()
    assert (answer["inputs"], answer["outputs"]) == (["text", "image"], ["image"])
    assert answer["endpoints"] == ["/v1/chat/completions", "/v1/images/generations"]
    (stage,) = answer["stages"]
    assert stage["kind"] == "DiT" and stage["sampling_params"]["num_inference_steps"] == 50
    assert "strength" not in stage["sampling_params"] and "num_frames" not in stage["sampling_params"]


def test_the_times_of_a_request(omni_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> tuple[str, Any, int]:
        message: Any = {"role": "user", "content": "hello"}
        answer = await client.chat.completions.create(model=MODEL, messages=[message], max_tokens=3)
        times = await client._client.get(f"/v1/pipeline/requests/{answer.id}")
        unknown = await client._client.get("/v1/pipeline/requests/unknown")
        return answer.id, times.json(), unknown.status_code

    request_id, times, status = use(omni_app, main)
    assert status == 404 and times["id"] == request_id
    (stage,) = times["stages"]
    assert stage["name"] == "thinker" and stage["num_output_tokens"] == 3
    assert 0 <= stage["arrival"] <= stage["started"] <= stage["finished"] < 60


def test_only_the_owner_finds_a_request_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MAX_RECENT", 2)
    recent = RecentRequests()
    for name in ("a", "b", "c"):
        recent.add(name, RecentRequest(b"one", 0.0, []))
    assert recent.find("a", b"one") is None and recent.find("c", b"two") is None
    assert recent.find("c", b"one") is not None
    for name in ("d", "e"):
        recent.add(name, RecentRequest(b"two", 0.0, []))
    assert recent.find("c", b"one") is not None
