# SPDX-License-Identifier: Apache-2.0
"""Images of models that make an image's tokens first: the reference against `OmniLLM`, in one run, round by round.

    python benchmarks/image_tokens.py [--checkpoint glm_image | janus] [--concurrency 1 8] [--output FILE] [--quick]

Both get the same prompts, seed and weights, tiny ones of both sizes, choose tokens greedily in float32, and make the
same images: GLM-Image's of 256 x 256 pixels in 10 steps, Janus's of the one size that it has. The reference makes one
image after the other, on one thread, as each stage of ours does. `--concurrency` prompts are sent at once, and the next
ones when those are done.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Report, make_parser, mean, progress
from transformers.utils import logging

from vllm_omni import OmniLLM
from vllm_omni.testing.oracles.glm_image import GlmImageReference
from vllm_omni.testing.oracles.janus import JanusReference
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

ATOL = 1e-4
SUBJECTS = (
    "a harbour", "a desert at noon", "snow on a roof", "a kitchen table",
    "two ships at night", "a red cat by the sea", "a sign", "an old railway station in the rain",
)  # fmt: skip
GLM_IMAGE_CALL: dict[str, Any] = {"height": 256, "width": 256, "num_inference_steps": 10, "seed": 0}

Painter = Callable[[str], np.ndarray]
"""From a prompt to `[height, width, 3]` in [0, 1]."""


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        load_reference: It chooses the likeliest tokens.
        greedy: Parameters of our stages with which they do.
        max_num_seqs: Of the stage that makes tokens, for each request.
    """

    load_reference: Callable[[Path], Painter]
    greedy: list[dict[str, Any] | None]
    max_num_seqs: int = 1


def load_glm_image(model: Path) -> Painter:
    reference = GlmImageReference(model)
    return lambda prompt: reference.generate(prompt, **GLM_IMAGE_CALL).numpy()


def load_janus(model: Path) -> Painter:
    reference = JanusReference(model)
    return lambda prompt: reference.paint(reference.image_tokens(prompt)).numpy()


FAMILIES = {
    "glm_image": Family(load_glm_image, [{"temperature": 0.0}, {**GLM_IMAGE_CALL, "output_format": "np"}]),
    "janus": Family(load_janus, [{"temperature": 0.0}, None], max_num_seqs=2),
}


def measure(family: Family, size: str, model: Path, concurrencies: list[int], rounds: int, report: Report) -> None:
    """Adds the rows and ratios of one checkpoint."""
    paint = family.load_reference(model)
    expected = [paint(prompt) for prompt in SUBJECTS]
    seconds: dict[int, list[float]] = {concurrency: [] for concurrency in (0, *concurrencies)}
    at_once = max(concurrencies)
    with OmniLLM(str(model), dtype="float32", max_num_seqs=family.max_num_seqs * at_once) as llm:
        make = partial(make_images, llm, family.greedy)
        make(at_once)  # warms up
        for number in range(rounds):
            progress(f"{size}: round {number + 1} of {rounds}")
            start = time.perf_counter()
            for prompt in SUBJECTS:
                paint(prompt)
            seconds[0].append(time.perf_counter() - start)
            for concurrency in concurrencies:
                start = time.perf_counter()
                images = make(concurrency)
                seconds[concurrency].append(time.perf_counter() - start)
                for image, wanted in zip(images, expected, strict=True):
                    np.testing.assert_allclose(image, wanted, rtol=0, atol=ATOL)
    for concurrency, values in seconds.items():
        backend = "reference" if concurrency == 0 else "OmniLLM"
        rate = len(SUBJECTS) / mean(values)
        report.rows.append({"size": size, "backend": backend, "concurrency": max(1, concurrency), "requests/s": rate})
        if concurrency:
            report.ratios[f"{size}_requests_per_second_c{concurrency}"] = mean(seconds[0]) / mean(values)


def make_images(llm: OmniLLM, params: list[dict[str, Any] | None], concurrency: int) -> list[Any]:
    outputs = []
    for start in range(0, len(SUBJECTS), concurrency):
        outputs += llm.generate(list(SUBJECTS[start : start + concurrency]), params, use_tqdm=False)
    return [output.images[0] for output in outputs]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoint", choices=list(FAMILIES), default="glm_image")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at once (default 1 8)")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    report = Report("image_tokens", {"model": args.checkpoint, "quick": str(args.quick)})
    with tempfile.TemporaryDirectory() as folder:
        for size in ("default", "large"):
            model = write_tiny_checkpoint(args.checkpoint, Path(folder) / size, size=size)
            measure(FAMILIES[args.checkpoint], size, model, args.concurrency, 1 if args.quick else 5, report)
    report.notes.append("ratios are to the reference")
    report.finish(args.output)


if __name__ == "__main__":
    main()
