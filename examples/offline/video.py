# SPDX-License-Identifier: Apache-2.0
"""Generates a video as an MP4 file.

python examples/offline/video.py "A boat leaves." --frames 33 --fps 16 --output boat.mp4
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_omni import OmniLLM


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    width, height = map(int, args.size.split("x"))
    settings = {"width": width, "height": height, "num_frames": args.frames, "fps": args.fps, "seed": args.seed}
    if args.steps:  # default: the model's
        settings["num_inference_steps"] = args.steps
    with OmniLLM(args.model) as llm:
        (output,) = llm.generate(args.prompt, settings | {"output_format": "mp4"})
    args.output.write_bytes(output.videos[0])
    print(f"video: {args.output}, {args.frames} frames, {args.frames / output.fps:.2f} s")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="A boat leaves.")
    parser.add_argument("--output", type=Path, default=Path("video.mp4"))
    parser.add_argument("--size", default="832x480", help="WIDTHxHEIGHT")
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--fps", type=float, default=16)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
