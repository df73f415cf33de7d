# SPDX-License-Identifier: Apache-2.0
"""Edits an image by a prompt, and saves the result.

vllm serve Qwen/Qwen-Image-Edit --omni
python examples/online/image_edit.py lighthouse.png "The same at night." --output night.png
"""

import argparse
import base64
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    answer = client.images.edit(
        model=args.model or client.models.list().data[0].id,
        image=args.images,
        prompt=args.prompt,
        # Fields that OpenAI's own models do not have.
        extra_body={"strength": args.strength, "num_inference_steps": args.steps, "seed": args.seed},
    )
    args.output.write_bytes(base64.b64decode(answer.data[0].b64_json))
    print(f"image: {args.output}, {answer.size}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="several, if the model takes them")
    parser.add_argument("prompt")
    parser.add_argument("--output", type=Path, default=Path("edited.png"))
    parser.add_argument("--strength", type=float, help="how far the image is changed, 0 to 1; not every model has it")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
