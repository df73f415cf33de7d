# SPDX-License-Identifier: Apache-2.0
"""Chat about an image, audio and a video, each a file or an http address. The server fetches addresses itself.

vllm serve shapes --omni
python examples/online/chat_media_input.py "What is in the picture?" --image demo_output/picture.png
"""

import argparse
import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def as_url(place: str) -> str:
    """An address as it is; a file as a data URI, which is part of the request."""
    if place.startswith(("http://", "https://")):
        return place
    media_type = mimetypes.guess_type(place)[0] or "application/octet-stream"
    return f"data:{media_type};base64,{base64.b64encode(Path(place).read_bytes()).decode()}"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    content: list[dict] = []
    for kind in ("image", "audio", "video"):  # OpenAI's own "input_audio" is supported as well.
        for place in vars(args)[kind]:
            content.append({"type": f"{kind}_url", f"{kind}_url": {"url": as_url(place)}})
    content.append({"type": "text", "text": args.prompt})

    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    answer = client.chat.completions.create(
        model=args.model or client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        max_completion_tokens=args.max_tokens,
    )
    print(answer.choices[0].message.content)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="What do you see, and what do you hear?")
    for kind in ("image", "audio", "video"):
        parser.add_argument(f"--{kind}", action="append", default=[], metavar="FILE_OR_URL", help="may be repeated")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
