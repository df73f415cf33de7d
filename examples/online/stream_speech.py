# SPDX-License-Identifier: Apache-2.0
"""Streamed speech: prints the text and saves the speech while they are made. A player can play the growing file.

vllm serve talk --omni
python examples/online/stream_speech.py "Why is the sea blue?" --output answer.wav
"""

import argparse
import base64
import json
import time
import wave
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id
    start, ttfa = time.perf_counter(), 0.0
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.prompt}],
        modalities=["text", "audio"],
        stream=True,  # The default format of streamed speech is pcm16.
        extra_body={"sampling_params_list": args.sampling_params_list},
    )
    with wave.open(str(args.output), "wb") as file:
        file.setparams((1, 2, 24_000, 0, "NONE", "not compressed"))  # Mono, 16 bits, 24 kHz.
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            if choice.delta.content:
                print(choice.delta.content, end="", flush=True)
            if choice.delta.audio and choice.delta.audio.data:
                ttfa = ttfa or time.perf_counter() - start
                file.writeframes(base64.b64decode(choice.delta.audio.data))
        seconds = file.getnframes() / file.getframerate()
    print(f"\nspeech: {args.output}, {seconds:.2f} s, time to first audio {ttfa:.2f} s")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Why is the sea blue?")
    parser.add_argument("--output", type=Path, default=Path("answer.wav"))
    parser.add_argument("--sampling-params-list", type=json.loads, help='JSON: [{"temperature": 0}, null, null]')
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
