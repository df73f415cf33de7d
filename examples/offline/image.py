# SPDX-License-Identifier: Apache-2.0
"""Generates images, and prints the progress.

python examples/offline/image.py "A red circle is left of a blue square." --output painting.png
python examples/offline/image.py "A lighthouse in a storm." --size 1024x768 --model Qwen/Qwen-Image
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_omni import CompletedEvent, ErrorEvent, ImageProgressEvent, OmniLLM


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    settings = {"num_outputs_per_prompt": args.n, "seed": args.seed}
    if args.size:
        settings["width"], settings["height"] = map(int, args.size.split("x"))
    if args.steps:
        settings["num_inference_steps"] = args.steps
    with OmniLLM(args.model) as llm:
        for event in llm.generate(args.prompt, settings, stream=True):
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, ImageProgressEvent):
                print(f"image {event.index}: step {event.step + 1} of {event.num_steps}", flush=True)
            elif isinstance(event, CompletedEvent):
                for i, image in enumerate(event.outputs[0].images):
                    path = args.output.with_stem(f"{args.output.stem}-{i}") if i else args.output
                    image.save(path)
                    print(f"image: {path}, {image.width}x{image.height}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="A red circle is left of a blue square.")
    parser.add_argument("--output", type=Path, default=Path("image.png"))
    parser.add_argument("--size", help="WIDTHxHEIGHT; default: the model's")
    parser.add_argument("--n", type=int, default=1, help="number of images")
    parser.add_argument("--steps", type=int, help="default: the model's")
    parser.add_argument("--seed", type=int, help="of the first image; further ones have seed + 1, ...")
    parser.add_argument("--model", default="shapes-painter")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
