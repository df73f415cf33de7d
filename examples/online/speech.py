# SPDX-License-Identifier: Apache-2.0
"""The speech endpoint: speaks a text, and writes the file while it is made.

vllm serve talk --omni
python examples/online/speech.py "Good morning." --output morning.mp3
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    if args.list_voices:
        print("\n".join(voice["id"] for voice in client.get("/audio/voices", cast_to=dict)["voices"]))
        return
    with client.audio.speech.with_streaming_response.create(
        model=args.model or client.models.list().data[0].id,
        input=args.text,
        voice=args.voice,
        response_format=args.output.suffix.removeprefix("."),
        speed=args.speed,
        extra_body={"sampling_params_list": args.sampling_params_list},
    ) as response:
        response.stream_to_file(args.output)
    print(f"speech: {args.output}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="Good morning.")
    parser.add_argument("--output", type=Path, default=Path("speech.mp3"), help=".mp3, .wav, .flac, .opus, .aac, .pcm")
    parser.add_argument("--voice", default="default", help="one of --list-voices, or of OpenAI's: alloy, ash, ...")
    parser.add_argument("--list-voices", action="store_true", help="print the model's voices, and exit")
    parser.add_argument("--speed", type=float, default=1.0, help="0.25 to 4")
    parser.add_argument("--sampling-params-list", type=json.loads, help='JSON: [null, {"temperature": 0.7}, null]')
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
