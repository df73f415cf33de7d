# SPDX-License-Identifier: Apache-2.0
"""Edits an image by a prompt, and saves the result.

python examples/offline/image_edit.py lighthouse.png "The same at night." --output night.png
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vllm_omni import OmniLLM


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    settings = {"strength": args.strength, "num_inference_steps": args.steps, "seed": args.seed}
    settings = {name: value for name, value in settings.items() if value is not None}
    prompt = {"prompt": args.prompt, "multi_modal_data": {"image": Image.open(args.image)}}
    with OmniLLM(args.model) as llm:
        (output,) = llm.generate(prompt, settings)
    image = output.images[0]
    image.save(args.output)
    print(f"image: {args.output}, {image.width}x{image.height}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--output", type=Path, default=Path("edited.png"))
    parser.add_argument("--strength", type=float, help="how far the image is changed, 0 to 1; not in every model")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--model", default="Qwen/Qwen-Image-Edit")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
