# SPDX-License-Identifier: Apache-2.0
"""Offline chat with speech: answers a question about an image, and saves the speech.

python examples/offline/chat_speech.py "Why is exercise healthy?" --output answer.wav
python examples/offline/chat_speech.py "What is this?" --image cat.png --model Qwen/Qwen3-Omni-30B-A3B-Instruct
"""

import argparse
import wave
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vllm_omni import OmniLLM


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    content: list[dict] = [{"type": "text", "text": args.prompt}]
    if args.image:
        content.insert(0, {"type": "image_pil", "image_pil": Image.open(args.image)})

    with OmniLLM(args.model) as llm:
        for output in llm.chat([{"role": "user", "content": content}]):
            if output.final_output_type == "text":
                print(f"text:   {output.outputs[0].text}")
            else:
                save(args.output, output.multimodal_output["audio"].numpy(), output.sample_rate)


def save(path: Path, samples, rate: int) -> None:
    """Samples are float32 in [-1, 1]."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", "not compressed"))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    print(f"speech: {path}, {len(samples) / rate:.2f} s")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Why is the sea blue?")
    parser.add_argument("--image", type=Path)
    parser.add_argument("--output", type=Path, default=Path("answer.wav"))
    parser.add_argument("--model", default="talk")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
