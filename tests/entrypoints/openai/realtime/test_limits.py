# SPDX-License-Identifier: Apache-2.0
"""Limits of sessions, ephemeral keys, and the pace of speech."""

import asyncio
import base64
import time
from typing import Any

import numpy as np
import openai
import pytest
import websockets
from fastapi import FastAPI
from websockets.exceptions import InvalidStatus

from tests.entrypoints.openai.media_apps import app_of, send, with_flags
from tests.entrypoints.openai.realtime.fake_chat import TONE, FakeChat, session_app
from tests.entrypoints.openai.realtime.sessions import Session, converse, opened, refusal, speech_of, visit
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.realtime import client_secrets
from vllm_omni.entrypoints.openai.realtime.client_secrets import ClientSecrets
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni.errors import PipelineFullError

GROUP = "llm"
SECRETS = "/v1/realtime/client_secrets"
SECOND = base64.b64encode(np.zeros(24000, "<i2").tobytes()).decode()


def test_sessions_at_once() -> None:
    """Of one key, while another one has room, and of all."""
    app = session_app(FakeChat(), api_key=["one", "other", "third"], max_realtime_sessions=4)

    def open(url: str, key: str) -> Any:
        return opened(url, key=key, model="fake")

    async def main(url: str) -> None:
        async with open(url, "one"), open(url, "one") as session:
            status, body = await refusal(url, key="one", model="fake")
            assert status == 429 and b"--max-client-realtime-sessions" in body
            async with open(url, "other") as other, open(url, "other"):
                await other.say("Hello")
                status, body = await refusal(url, key="third", model="fake")
                assert status == 429 and b"--max-realtime-sessions" in body
            await session.connection.close()
            for _ in range(2):
                async with open(url, "one") as session:
                    await session.say("Hello")
        status, body = await refusal(url, key="one", model="gpt-realtime")
        assert status == 404 and b"fake" in body

    visit(app, main)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--realtime-idle-timeout-s=0.3", "--max-realtime-session-s=0.3"])
def test_a_session_expires(realtime_app: FastAPI, flag: str) -> None:
    async def main(session: Session) -> None:
        assert (await session.error()).code == "session_expired"
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            await session.next()

    converse(with_flags(realtime_app, flag), main, manual=False)


def test_seconds_of_sound(realtime_app: FastAPI) -> None:
    async def main(session: Session) -> None:
        buffer = session.connection.input_audio_buffer
        await buffer.append(audio=SECOND)
        await buffer.commit()
        first = (await session.until("conversation.item.done"))[-1].item
        # Of the buffer the newest sound is kept.
        for level in (1, 2, 3):
            await buffer.append(audio=base64.b64encode(np.full(24_000, level, "<i2").tobytes()).decode())
        await buffer.commit()
        item = (await session.until("conversation.item.done"))[-1].item
        assert (await session.next()).item_id == first.id and session.events[-1].type == "conversation.item.deleted"
        kept = (await session.retrieve(item.id)).content[0].audio
        samples = np.frombuffer(base64.b64decode(kept), "<i2")
        np.testing.assert_array_equal(samples, np.repeat([1, 2, 3], [12_000, 24_000, 24_000]))
        await session.create({"type": "input_audio", "audio": base64.b64encode(bytes(48_000 * 3)).decode()})
        error = await session.error()
        assert error.code == "audio_limit_exceeded" and "--max-realtime-audio-s" in error.message
        assert (await session.respond(output_modalities=["text"]))[-1].response.output

    converse(with_flags(realtime_app, "--max-realtime-audio-s=2.5"), main)


def test_bytes_of_texts(realtime_app: FastAPI) -> None:
    async def main(session: Session) -> None:
        await session.configure(truncation="disabled")
        item = await session.say("x" * 800)
        await session.create({"type": "input_text", "text": "x" * 800})
        error = await session.error()
        assert error.code == "text_limit_exceeded" and "--max-realtime-text-bytes" in error.message
        await session.delete(item.id)
        await session.say("x" * 800)

    converse(with_flags(realtime_app, "--max-realtime-text-bytes=1500"), main)


def test_speech_is_sent_at_the_pace_of_its_playing() -> None:
    """Six tenths of a second, which are made at once."""
    chat = FakeChat()
    chat.answer = lambda messages: [ChatDelta(text="Hello."), *[ChatDelta(speech=TONE)] * 6]

    async def main(session: Session) -> float:
        await session.say("Hello")
        before = time.monotonic()
        assert len(speech_of(await session.respond())) == 6 * 2 * len(TONE)
        return time.monotonic() - before

    assert converse(session_app(chat, realtime_lead_s=0.2), main, model="fake") >= 0.39


def test_ephemeral_keys(realtime_app: FastAPI) -> None:
    app = with_flags(realtime_app, "--api-key=secret")
    settings = {"type": "realtime", "instructions": "Be kind.", "audio": {"output": {"voice": "alloy"}}}

    async def main(url: str) -> None:
        before = int(time.time())
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            created = await client.realtime.client_secrets.create(
                expires_after={"anchor": "created_at", "seconds": 600},
                session=settings,  # type: ignore[arg-type]
            )
        assert created.value.startswith("ek_") and before <= created.expires_at - 600 <= time.time()
        async with opened(url, key=created.value) as session:
            assert session.events[0].session.instructions == "Be kind."
            assert session.events[0].session.audio.output.voice == "alloy"
        async with opened(url, key="secret"):
            pass
        assert (await refusal(url, key="ek_wrong"))[0] == 401
        # As a browser sends it, which may also have the server's key.
        address = url.replace("http", "ws") + "/v1/realtime"
        for key in (created.value, "secret"):
            protocols: Any = ["realtime", f"openai-insecure-api-key.{key}"]
            async with websockets.connect(address, subprotocols=protocols) as socket:
                assert socket.subprotocol == "realtime" and '"session.created"' in str(await socket.recv())
        for protocols in (["realtime"], ["realtime", "openai-insecure-api-key.wrong"], ["openai-insecure-api-key."]):
            with pytest.raises(InvalidStatus) as caught:
                await websockets.connect(address, subprotocols=protocols)
            assert caught.value.response.status_code == 401
        # It is for sessions only.
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=created.value) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    visit(app, main)


def test_wrong_requests_for_keys(realtime_app: FastAPI) -> None:
    for body, param in [
        ({"session": {"type": "realtime", "audio": {"output": {"voice": "nobody"}}}}, "session.audio.output.voice"),
        ({"session": {"type": "transcription"}}, "session.type"),
        ({"session": {"type": "realtime", "colour": "red"}}, "session.colour"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    ]:
        answer = send(realtime_app, "POST", SECRETS, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_keys_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(client_secrets, "MAX_SECRETS", 2)
    keys = ClientSecrets()
    first, second, third = (keys.create(seconds, b"owner", {}) for seconds in (10, 20, 30))
    assert keys.find(first.value) is None and keys.find(second.value) is second and keys.find("") is None
    monkeypatch.setattr(client_secrets.time, "time", lambda: 1e12)  # A clock that is set ends none.
    assert keys.find(second.value) is second
    monkeypatch.setattr(client_secrets.time, "monotonic", lambda: now + 25)
    assert keys.find(second.value) is None and keys.find(third.value) is third


def test_the_keys_of_one_owner_do_not_remove_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_secrets, "MAX_SECRET_BYTES", 1000)
    keys = ClientSecrets()
    kept = keys.create(60, b"one", {"instructions": "x" * 900})
    large = [keys.create(60, b"other", {"instructions": "x" * 600}) for _ in range(3)]
    assert keys.find(kept.value) is kept
    assert [keys.find(key.value) for key in large] == [None, None, large[2]]


def test_a_model_that_does_not_hear_or_speak(text_async_llm: AsyncOmniLLM, tiny_qwen3: Any) -> None:
    client = OmniEngineClient(text_async_llm)
    client.default_sampling_params["max_tokens"] = 8

    async def main(session: Session) -> None:
        created = session.events[0].session
        assert created.output_modalities == ["text"] and created.audio.input.turn_detection is None
        await session.connection.input_audio_buffer.append(audio=SECOND)
        assert "does not accept audio" in (await session.error()).message
        await session.connection.session.update(session={"type": "realtime", "output_modalities": ["audio"]})
        assert (await session.error()).param == "session.output_modalities"
        await session.say("Hello")
        assert (await session.respond())[-1].response.output[0].content[0].text

    converse(app_of(client, tiny_qwen3), main, manual=False)


@pytest.mark.parametrize("num_steps", range(5))
def test_a_cancelled_session_ends_although_a_message_comes(num_steps: int) -> None:
    """At whichever step of the event loop after the message."""
    app = session_app(FakeChat())
    scope = {
        "type": "websocket", "asgi": {"version": "3.0"}, "scheme": "ws", "path": "/v1/realtime", "root_path": "",
        "raw_path": b"/v1/realtime", "query_string": b"model=fake", "headers": [], "subprotocols": [],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip

    async def main() -> None:
        messages, is_open = asyncio.Queue[Any](), asyncio.Event()

        async def send(message: Any) -> None:
            if "session.created" in message.get("text", ""):
                is_open.set()

        messages.put_nowait({"type": "websocket.connect"})
        running = asyncio.create_task(app(scope, messages.get, send))  # type: ignore[arg-type]
        await is_open.wait()
        await asyncio.sleep(0.01)  # It waits for a message.
        messages.put_nowait({"type": "websocket.receive", "text": "{}"})
        for _ in range(num_steps):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=10)
        running.cancel()
        assert done and running.cancelled()

    asyncio.run(main())


def test_the_configurations_of_the_keys_of_all_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_secrets, "MAX_TOTAL_SECRET_BYTES", 2000)
    keys = ClientSecrets()
    made = keys.create(60, b"one", {"instructions": "x" * 1500})
    with pytest.raises(PipelineFullError):
        keys.create(60, b"other", {"instructions": "x" * 500})
    assert keys.find(made.value) is made
    assert keys.create(60, b"other", {"instructions": "x" * 300})
