# SPDX-License-Identifier: Apache-2.0
"""Sings a text, and writes the sound while it is made.

python sing.py DIR "Good morning" --instrument harp --output tune.wav
"""

import argparse
import wave
from collections.abc import Sequence

from vllm_omni import ARSegmentEvent, OmniLLM


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    information = {"speaker": args.instrument, "tempo": args.tempo}
    with OmniLLM(args.model) as llm, wave.open(args.output, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        prompt = {"prompt": args.text, "additional_information": information}
        for event in llm.generate(prompt, stream=True, use_tqdm=False):
            if isinstance(event, ARSegmentEvent) and "audio" in event.multimodal_output:
                audio = event.multimodal_output["audio"]  # float32 in [-1, 1]
                file.writeframes((audio.clamp(-1, 1) * 32767).short().numpy().tobytes())
                print(f"{len(audio) / 24_000:.2f} s", flush=True)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder of the checkpoint")
    parser.add_argument("text", nargs="?", default="Good morning")
    parser.add_argument("--instrument", default="flute", help="flute, organ or harp")
    parser.add_argument("--tempo", type=float, default=240, help="beats per minute")
    parser.add_argument("--output", default="tune.wav")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
