import asyncio, base64
from typing import Any
import openai
from fastapi import FastAPI
from tests.entrypoints.openai.media_apps import MODEL, use
from tests.entrypoints.openai.realtime.sessions import MANUAL, Session, converse
from vllm_omni.testing.media import make_audio
SOUND = (make_audio(0, 0.7) * 32767).astype("<i2")
GROUP = "app"

def test_a_chat(realtime_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> Any:
        stream = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Why is the sea blue?"}], stream=True, modalities=["text", "audio"], audio={"format": "pcm16", "voice": "default"})
        n = 0
        async for chunk in stream:
            audio = chunk.choices and getattr(chunk.choices[0].delta, "audio", None)
            n += len((audio if isinstance(audio, dict) else {}).get("data", ""))
        return n
    assert use(realtime_app, main) > 100

def test_b_realtime(realtime_app: FastAPI) -> None:
    async def main(session: Session) -> list[Any]:
        await session.speak(SOUND)
        return await session.respond()
    events = converse(realtime_app, main)
    assert any(e.type == "response.output_audio.delta" for e in events)
