# SPDX-License-Identifier: Apache-2.0
"""A spoken turn of a realtime session: sends a recording, prints the answer while it is made, and saves its speech.

vllm serve shapes --omni
python examples/online/realtime.py question.wav --output answer.wav
"""

import argparse
import base64
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
from openai import OpenAI

RATE = 24_000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, help=f"a mono sound file of {RATE} Hz")
    parser.add_argument("--output", type=Path, default=Path("answer.wav"))
    parser.add_argument("--instructions", default="Answer briefly.")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args(argv)
    question, _ = soundfile.read(args.recording, dtype="int16")
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    speech = bytearray()
    with client.realtime.connect(model=client.models.list().data[0].id) as connection:
        manual = {"input": {"turn_detection": None}}  # The program ends the turn, not the server.
        connection.session.update(session={"type": "realtime", "instructions": args.instructions, "audio": manual})
        connection.input_audio_buffer.append(audio=base64.b64encode(question.tobytes()).decode())
        connection.input_audio_buffer.commit()
        connection.response.create()
        for event in connection:
            if event.type == "error":
                raise SystemExit(event.error.message)
            if event.type == "response.output_audio_transcript.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "response.output_audio.delta":
                speech += base64.b64decode(event.delta)
            elif event.type == "response.done":
                break
    print(f"\nstatus: {event.response.status}")
    soundfile.write(args.output, np.frombuffer(speech, np.int16), RATE, "PCM_16")
    print(f"speech: {len(speech) / 2 / RATE:.2f} s, {args.output}")


if __name__ == "__main__":
    main()
