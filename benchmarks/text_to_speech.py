# SPDX-License-Identifier: Apache-2.0
"""Text-to-speech models, offline: the reference against `OmniLLM`, and the time to the first sound.

    python benchmarks/text_to_speech.py [--checkpoint NAME] [--concurrency 1 8] [--output FILE.json] [--quick]
    python benchmarks/text_to_speech.py --checkpoint qwen3_tts [--reference-python QWEN_TTS/bin/python]

Both get the same prompts and weights, tiny ones of both sizes, greedily in float32 with one seed, and make the same
sound. The reference runs one prompt after the other, on one thread, as each stage of ours does. `--concurrency` prompts
are sent at once, and the next ones when those are done. The first sound is that of a streamed prompt with 10 seconds of
speech. A reference that cannot be installed beside this package runs in another environment; without it only ours is
measured.
"""

import base64
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from report import Report, make_parser, mean, progress
from transformers.utils import logging

from vllm_omni import OmniLLM
from vllm_omni.inputs import OmniPrompt
from vllm_omni.testing.oracles.csm import CsmReference
from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference
from vllm_omni.testing.oracles.vibevoice import VibeVoiceReference
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

MAX_FRAMES = 60
LONG_SECONDS = 10
"""Of the speech whose first sound is timed."""

TEXTS = (
    "sound and light", "the red river", "hello there", "look at the white dog",
    "two cats", "one long day", "water and wind", "my old home",
)  # fmt: skip


class Speech(NamedTuple):
    audio: torch.Tensor


class QwenTTSReference:
    """`qwen_tts_reference.py` in a process with another Python."""

    def __init__(self, python: Path, model: Path) -> None:
        self._command = [str(python), str(Path(__file__).with_name("qwen_tts_reference.py")), str(model)]
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def speak(self, prompt: OmniPrompt, max_frames: int) -> Speech:
        assert self._process.stdin is not None and self._process.stdout is not None
        speaker = prompt["additional_information"]["speaker"]
        request = {"text": prompt["prompt"], "speaker": speaker, "max_frames": max_frames}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the reference has ended; see what it says: {' '.join(self._command)}")
        return Speech(torch.from_numpy(np.frombuffer(base64.b64decode(answer), np.float32).copy()))

    def close(self) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        reference: Loads a checkpoint; its `speak(prompt, max_frames)` returns something with `audio`, `[samples]`.
            None: there is no environment for it.
        stage: The stage that makes frames.
        frame_rate: Frames for a second of speech.
        num_sequences: Of the engine, for each request.
        information: Of every prompt.
    """

    reference: Callable[[Path], Any] | None
    stage: str
    frame_rate: float = 12.5
    num_sequences: int = 1
    information: dict[str, Any] = field(default_factory=dict)

    def prompt(self, text: str) -> OmniPrompt:
        return {"prompt": text, "additional_information": self.information}


def make_family(checkpoint: str, reference_python: Path | None) -> Family:
    if checkpoint == "csm":
        return Family(CsmReference, "backbone")
    if checkpoint == "higgs_audio_v2":
        return Family(HiggsAudioReference, "backbone", frame_rate=25.0)
    if checkpoint == "vibevoice":
        return Family(VibeVoiceReference, "language_model", frame_rate=7.5, num_sequences=2)
    reference = None if reference_python is None else partial(QwenTTSReference, reference_python)
    return Family(reference, "talker", information={"speaker": "ryan"})


def measure(family: Family, size: str, model: Path, concurrencies: list[int], rounds: int, report: Report) -> None:
    """Adds the rows and ratios of one checkpoint."""
    prompts = [family.prompt(text) for text in TEXTS]
    greedy = {"default_sampling_params": {"temperature": 0.0, "max_tokens": MAX_FRAMES + 1, "seed": 0}}
    with ExitStack() as stack:
        llm = stack.enter_context(
            OmniLLM(
                str(model),
                dtype="float32",
                max_model_len=512,
                max_num_seqs=max(concurrencies) * family.num_sequences,
                stage_overrides={family.stage: greedy},
            )
        )
        reference = None if family.reference is None else family.reference(model)
        if isinstance(reference, QwenTTSReference):
            stack.callback(reference.close)
        expected = [] if reference is None else [reference.speak(prompt, MAX_FRAMES).audio for prompt in prompts]
        llm.generate(prompts, use_tqdm=False)  # warms up
        seconds: dict[int, list[float]] = {concurrency: [] for concurrency in (0, *concurrencies)}
        for number in range(rounds):
            progress(f"{size}: round {number + 1} of {rounds}")
            if reference is not None:
                start = time.perf_counter()
                for prompt in prompts:
                    reference.speak(prompt, MAX_FRAMES)
                seconds[0].append(time.perf_counter() - start)
            for concurrency in concurrencies:
                start = time.perf_counter()
                made = generate(llm, prompts, concurrency)
                seconds[concurrency].append(time.perf_counter() - start)
                if reference is not None:
                    check(made, expected)
        first, whole = zip(*(time_to_first_sound(llm, family) for _ in range(rounds)), strict=True)
    if reference is None:
        del seconds[0]
    for concurrency, values in seconds.items():
        backend = "reference" if concurrency == 0 else "OmniLLM"
        rate = len(prompts) / mean(values)
        report.rows.append({"size": size, "backend": backend, "concurrency": max(1, concurrency), "requests/s": rate})
        if concurrency and reference is not None:
            report.ratios[f"{size}_requests_per_second_c{concurrency}"] = mean(seconds[0]) / mean(values)
    report.ratios[f"{size}_first_sound_to_whole"] = mean(first) / mean(whole)


def generate(llm: OmniLLM, prompts: Sequence[OmniPrompt], concurrency: int) -> list[torch.Tensor]:
    outputs = []
    for start in range(0, len(prompts), concurrency):
        outputs += llm.generate(prompts[start : start + concurrency], use_tqdm=False)
    return [output.multimodal_output["audio"] for output in outputs]


def check(made: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for audio, wave in zip(made, expected, strict=True):
        torch.testing.assert_close(audio, wave, rtol=0, atol=1e-4)


def time_to_first_sound(llm: OmniLLM, family: Family) -> tuple[float, float]:
    """Seconds to the first sound and to the end of `LONG_SECONDS` of speech, streamed."""
    num_tokens = round(LONG_SECONDS * family.frame_rate) + 1
    long = {"temperature": 0.0, "max_tokens": num_tokens, "min_tokens": num_tokens}
    params = [long if stage.name == family.stage else None for stage in llm.config.stage_args]
    start, first = time.perf_counter(), 0.0
    for event in llm.generate(family.prompt(TEXTS[0]), params, stream=True, use_tqdm=False):
        if not first and len(getattr(event, "multimodal_output", {}).get("audio", ())):
            first = time.perf_counter() - start
    return first, time.perf_counter() - start


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoint", choices=["csm", "higgs_audio_v2", "qwen3_tts", "vibevoice"], default="csm")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at once (default 1 8)")
    parser.add_argument("--reference-python", type=Path, metavar="PATH", help="of an environment with qwen-tts")
    args = parser.parse_args()
    family = make_family(args.checkpoint, args.reference_python)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    report = Report("text_to_speech", {"model": args.checkpoint, "quick": str(args.quick)})
    with tempfile.TemporaryDirectory() as folder:
        for size in ("default", "large"):
            model = write_tiny_checkpoint(args.checkpoint, Path(folder) / size, size=size)
            measure(family, size, model, args.concurrency, 1 if args.quick else 5, report)
    report.notes.append("ratios are to the reference; first sound to whole: of 10 s of speech, streamed")
    report.finish(args.output)


if __name__ == "__main__":
    main()
