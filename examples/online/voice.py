# SPDX-License-Identifier: Apache-2.0
"""A reference voice: uploads a recording, speaks a text with that voice, and removes it from the server.

vllm serve sesame/csm-1b --omni
python examples/online/voice.py "Good morning." --recording me.wav --transcript "This is how I speak." \
    --consent "This is my voice, and I agree." --output morning.wav
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    voice = client.audio.voices.create(
        name=args.name,
        audio_sample=args.recording,
        consent=args.consent,
        extra_body={"ref_text": args.transcript} if args.transcript else None,
    )
    print(f"voice:  {voice.name} ({voice.id})")
    try:
        with client.audio.speech.with_streaming_response.create(
            model=args.model or client.models.list().data[0].id,
            input=args.text,
            voice=voice.name,  # or {"id": voice.id}
            response_format=args.output.suffix.removeprefix("."),
        ) as response:
            response.stream_to_file(args.output)
        print(f"speech: {args.output}")
    finally:
        client.audio.voices.delete(voice.id)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="Good morning.")
    parser.add_argument("--recording", type=Path, required=True, help="of the voice, some seconds of it")
    parser.add_argument("--transcript", help="what is said in it; CSM needs it")
    parser.add_argument("--consent", required=True, help="why the voice may be used")
    parser.add_argument("--name", default="narrator", help="how requests name the voice")
    parser.add_argument("--output", type=Path, default=Path("speech.mp3"), help=".mp3, .wav, .flac, .opus, .aac, .pcm")
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
