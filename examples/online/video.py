# SPDX-License-Identifier: Apache-2.0
"""Makes a video: creates the job, polls it until it has ended, downloads the file, and deletes the job.

vllm serve Wan-AI/Wan2.1-T2V-1.3B-Diffusers --omni
python examples/online/video.py "A boat leaves." --seconds 2 --output boat.mp4
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    video = client.videos.create(
        model=args.model or client.models.list().data[0].id,
        prompt=args.prompt,
        # Null: the model's default.
        extra_body={"seconds": args.seconds, "size": args.size, "num_inference_steps": args.steps, "seed": args.seed},
    )
    while video.status in ("queued", "in_progress"):
        print(f"\r{video.progress} %", end="", flush=True)
        time.sleep(args.interval)
        video = client.videos.retrieve(video.id)
    if video.error:
        raise SystemExit(f"\n{video.error.message}")
    client.videos.download_content(video.id).write_to_file(args.output)
    client.videos.delete(video.id)
    print(f"\rvideo: {args.output}, {video.size}, {video.seconds} s")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="A boat leaves.")
    parser.add_argument("--output", type=Path, default=Path("video.mp4"))
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--size", help="WIDTHxHEIGHT")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between polls")
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
