# SPDX-License-Identifier: Apache-2.0
"""Makes images of a prompt, and saves them.

vllm serve shapes-painter --omni
python examples/online/image.py "A red circle is left of a blue square." --output painting.png
"""

import argparse
import base64
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    answer = client.images.generate(
        model=args.model or client.models.list().data[0].id,
        prompt=args.prompt,
        size=args.size,
        n=args.n,
        # Fields that OpenAI's own models do not have. Null: the model's default.
        extra_body={"num_inference_steps": args.steps, "seed": args.seed, "negative_prompt": args.negative_prompt},
    )
    for i, image in enumerate(answer.data):
        path = args.output.with_stem(f"{args.output.stem}-{i}") if i else args.output
        path.write_bytes(base64.b64decode(image.b64_json))
        print(f"image: {path}, {answer.size}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="A lighthouse in a storm.")
    parser.add_argument("--output", type=Path, default=Path("image.png"))
    parser.add_argument("--size", default="auto", help="WIDTHxHEIGHT")
    parser.add_argument("--n", type=int, default=1, help="number of images")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, help="of the first image; the next have seed + 1, ...")
    parser.add_argument("--negative-prompt", help="what to avoid")
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
