# SPDX-License-Identifier: Apache-2.0
"""Speech to text with LiveKit Agents: `livekit_transcription.py URL KEY MODEL FILE`; the file is a WAV."""

import asyncio
import json
import sys
import wave

from livekit import rtc
from livekit.plugins import openai

url, key, model, file = sys.argv[1:]


async def main() -> None:
    stt = openai.STT(base_url=url, api_key=key, model=model)
    with wave.open(file) as sound:
        samples = sound.readframes(sound.getnframes())
        frame = rtc.AudioFrame(samples, sound.getframerate(), sound.getnchannels(), sound.getnframes())
    event = await stt.recognize(frame)
    print(json.dumps({"text": event.alternatives[0].text}))
    await stt.aclose()


asyncio.run(main())
