# SPDX-License-Identifier: Apache-2.0
"""Reads a text aloud with the model of tts.py and tts.yaml, without a server.

python examples/function_tts/say.py "Good morning." --output speech.wav
"""

import argparse
import wave
from collections.abc import Sequence
from pathlib import Path

from vllm_omni import OmniLLM


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    stages = Path(__file__).with_name("tts.yaml")
    with OmniLLM("tts", str(stages)) as omni:
        (output,) = omni.generate([{"stage": "tts", "prompt": args.text}])
    save(args.output, output.multimodal_output["audio"].numpy(), output.sample_rate)


def save(path: Path, samples, rate: int) -> None:
    """Samples are float32 in [-1, 1]."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", "not compressed"))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    print(f"speech: {path}, {len(samples) / rate:.2f} s")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", default="Good morning.")
    parser.add_argument("--output", type=Path, default=Path("speech.wav"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
