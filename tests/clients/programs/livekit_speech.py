# SPDX-License-Identifier: Apache-2.0
"""Text to speech with LiveKit Agents: `livekit_speech.py URL KEY MODEL TEXT FILE`; the file is a WAV."""

import asyncio
import json
import sys
from pathlib import Path

from livekit.plugins import openai

url, key, model, text, file = sys.argv[1:]


async def main() -> None:
    tts = openai.TTS(base_url=url, api_key=key, model=model)
    tts.prewarm()
    sound = await tts.synthesize(text).collect()
    Path(file).write_bytes(sound.to_wav_bytes())
    print(json.dumps({"seconds": sound.duration}))
    await tts.aclose()


asyncio.run(main())
