# SPDX-License-Identifier: Apache-2.0
"""Runs the authors' `qwen-tts` for `references.py`, in the environment that `make_fixtures.py` describes.

    QWEN_TTS/bin/python benchmarks/qwen_tts_reference.py CHECKPOINT

Reads a line for each prompt, `{"text": ..., "speaker": ..., "max_frames": ...}`, and writes one with the base64 of its
samples, float32.
"""

import base64
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "model_executor" / "models" / "qwen3_tts"))

import torch
from make_fixtures import import_reference


def main(checkpoint: str) -> None:
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    model = import_reference().from_pretrained(checkpoint, dtype=torch.float32, device_map="cpu")
    for line in sys.stdin:
        request = json.loads(line)
        (wave,), _ = model.generate_custom_voice(
            text=request["text"],
            speaker=request["speaker"],
            do_sample=False,
            subtalker_dosample=False,
            max_new_tokens=request["max_frames"] + 1,
        )
        print(base64.b64encode(wave.astype("float32").tobytes()).decode(), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
