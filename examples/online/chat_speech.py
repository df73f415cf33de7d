# SPDX-License-Identifier: Apache-2.0
"""Chat with speech: prints the answer and saves its speech.

vllm serve talk --omni
python examples/online/chat_speech.py "Why is the sea blue?" --output answer.wav
"""

import argparse
import base64
import json
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    answer = client.chat.completions.create(
        model=args.model or client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.prompt}],
        modalities=["text", "audio"],
        audio={"format": args.output.suffix.removeprefix("."), "voice": args.voice},
        extra_body={"sampling_params_list": args.sampling_params_list},
    )
    message = answer.choices[0].message
    print(f"text:   {message.content}")
    args.output.write_bytes(base64.b64decode(message.audio.data))
    print(f"speech: {args.output}")
    print(f"tokens: {answer.usage.completion_tokens}, of speech {answer.usage.completion_tokens_details.audio_tokens}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Why is the sea blue?")
    parser.add_argument("--output", type=Path, default=Path("answer.wav"), help=".wav, .mp3, .flac, .opus or .aac")
    parser.add_argument("--voice", help="default: the model's own")
    parser.add_argument("--sampling-params-list", type=json.loads, help='JSON: [{"temperature": 0}, null, null]')
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
