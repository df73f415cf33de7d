# SPDX-License-Identifier: Apache-2.0
"""A question that is answered aloud with Pipecat: `pipecat_chat.py URL KEY MODEL QUESTION FILE`; the file is a WAV."""

import asyncio
import json
import sys
import wave

from pipecat.frames.frames import LLMContextFrame, TTSAudioRawFrame, TTSTextFrame
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.tts import OpenAITTSService
from pipelines import run_pipeline

url, key, model, question, file = sys.argv[1:]


async def main() -> None:
    llm = OpenAILLMService(base_url=url, api_key=key, settings=OpenAILLMService.Settings(model=model))
    tts = OpenAITTSService(base_url=url, api_key=key, settings=OpenAITTSService.Settings(model=model))
    context = LLMContext([{"role": "user", "content": question}])
    frames = await run_pipeline(llm, tts, frames=[LLMContextFrame(context)])
    sound = [frame for frame in frames if isinstance(frame, TTSAudioRawFrame)]
    with wave.open(file, "wb") as output:
        output.setnchannels(sound[0].num_channels)
        output.setsampwidth(2)
        output.setframerate(sound[0].sample_rate)
        output.writeframes(b"".join(frame.audio for frame in sound))
    print(json.dumps({"text": " ".join(frame.text for frame in frames if isinstance(frame, TTSTextFrame))}))


asyncio.run(main())
