# SPDX-License-Identifier: Apache-2.0
"""What Home Assistant asks of a Wyoming server: `wyoming_satellite.py URL KEY MODEL PORT TEXT VOICE FILE SPOKEN`.

The speech is written to the file, a WAV; SPOKEN is a WAV to transcribe. URL, key and model are those of the server
behind the Wyoming server, whose clients do not know them.
"""

import asyncio
import json
import sys
import wave

from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop, wav_to_chunks
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Describe, Info
from wyoming.tts import Synthesize, SynthesizeVoice

_, _, _, port, text, voice, file, spoken = sys.argv[1:]


async def ask(*requests: Event, last: type) -> list[Event]:
    """Sends the requests; returns the answer, up to its last event."""
    answer = []
    async with AsyncTcpClient("127.0.0.1", int(port)) as client:
        for request in requests:
            await client.write_event(request)
        while not answer or not last.is_type(answer[-1].type):
            event = await client.read_event()
            if event is None or Error.is_type(event.type):
                sys.exit(f"no answer: {event}")
            answer.append(event)
    return answer


async def main() -> None:
    info = Info.from_event((await ask(Describe().event(), last=Info))[-1])
    voices = [voice.description for program in info.tts for voice in program.voices]

    synthesize = Synthesize(text, voice=SynthesizeVoice(name=voice))
    speech = await ask(synthesize.event(), last=AudioStop)
    start = AudioStart.from_event(speech[0])
    with wave.open(file, "wb") as output:
        output.setnchannels(start.channels)
        output.setsampwidth(start.width)
        output.setframerate(start.rate)
        for event in speech[1:-1]:
            output.writeframes(AudioChunk.from_event(event).audio)

    with wave.open(spoken) as sound:
        chunks = list(wav_to_chunks(sound, 1024, start_event=True, stop_event=True))
    events = [Transcribe(language="en").event(), *(chunk.event() for chunk in chunks)]
    transcript = Transcript.from_event((await ask(*events, last=Transcript))[-1])
    print(json.dumps({"voices": voices, "transcript": transcript.text}))


asyncio.run(main())
