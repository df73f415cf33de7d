# SPDX-License-Identifier: Apache-2.0
"""Speech to text with Pipecat: `pipecat_transcription.py URL KEY MODEL FILE`; the file is a WAV."""

import asyncio
import json
import sys
import wave

from pipecat.frames.frames import (
    InputAudioRawFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.services.openai.stt import OpenAISTTService
from pipelines import run_pipeline

url, key, model, file = sys.argv[1:]


async def main() -> None:
    with wave.open(file) as sound:
        rate, samples = sound.getframerate(), sound.readframes(sound.getnframes())
    stt = OpenAISTTService(base_url=url, api_key=key, sample_rate=rate, settings=OpenAISTTService.Settings(model=model))
    frames = [
        VADUserStartedSpeakingFrame(),
        InputAudioRawFrame(samples, rate, 1),
        VADUserStoppedSpeakingFrame(),
    ]
    texts = [frame.text for frame in await run_pipeline(stt, frames=frames) if isinstance(frame, TranscriptionFrame)]
    print(json.dumps({"text": " ".join(texts)}))


asyncio.run(main())
