# SPDX-License-Identifier: Apache-2.0
"""What the pipeline costs: one text-only stage through `OmniLLM` against plain `vllm.LLM`.

    python benchmarks/overhead.py [--model DIR] [--output FILE.json] [--quick]

All run the same model with the same engine arguments on the same batch of 32 prompts, in turns in one run, and all
tokens are compared. Plain vLLM runs twice: with its engine in processes of its own, which is its default, and inside
this process, where no message is sent at all.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from report import Report, make_parser, percentile, progress
from transformers.utils import logging
from vllm import LLM, SamplingParams

from vllm_omni import OmniLLM
from vllm_omni.testing.media import make_prompt
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

BATCH = 32
OMNI, PLAIN, INSIDE = "OmniLLM", "vllm.LLM", "vllm.LLM, in this process"
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": BATCH,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
}


class Backend:
    """Generates the batch, and keeps the rates."""

    def __init__(self, name: str, generate: Callable[[list[dict[str, Any]]], list[Any]]) -> None:
        self.name = name
        self._generate = generate
        self.rates: list[float] = []
        self.token_ids: list[list[int]] = []

    def run(self, prompts: list[dict[str, Any]]) -> None:
        started = time.perf_counter()
        outputs = self._generate(prompts)
        seconds = time.perf_counter() - started
        self.token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        self.rates.append(sum(map(len, self.token_ids)) / seconds)


def measure(model: Path, tokens: int, rounds: int) -> list[Backend]:
    """`OmniLLM` and plain vLLM, in turns; the first round of each warms up and is not counted."""
    prompts = [make_prompt(model, "text", seed) for seed in range(BATCH)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    progress("starting")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(OmniLLM, str(model), **ENGINE_ARGS)
        plain = LLM(model=str(model), **ENGINE_ARGS)
    with starting.result() as omni:
        inside = _llm_in_this_process(model)
        backends = [
            Backend(OMNI, lambda batch: omni.generate(batch, [params], use_tqdm=False)),
            Backend(PLAIN, lambda batch: plain.generate(batch, params, use_tqdm=False)),
            Backend(INSIDE, lambda batch: inside.generate(batch, params, use_tqdm=False)),
        ]
        for number in range(1 + rounds):
            progress(f"round {number} of {rounds}" if number else "warming up")
            for backend in backends:
                backend.run(prompts)
    for backend in backends:
        del backend.rates[0]
    return backends


def _llm_in_this_process(model: Path) -> LLM:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read while the engine is constructed
    try:
        return LLM(model=str(model), **ENGINE_ARGS)
    finally:
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, help="a text model; default: a tiny one with random weights")
    parser.add_argument("--size", default="default", help="of the tiny model: default or large")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokens, rounds = (64, 4) if args.quick else (128, 12)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_tiny_checkpoint("qwen3", folder, size=args.size)
        backends = measure(model, tokens, rounds)
    if any(backend.token_ids != backends[0].token_ids for backend in backends):
        sys.exit("not comparable: different tokens")
    report = Report("overhead", {"batch": BATCH, "tokens": tokens, "rounds": rounds, "quick": str(args.quick)})
    median = {backend.name: percentile(backend.rates, 50) for backend in backends}
    for backend in backends:
        name, rates = backend.name, backend.rates
        report.rows.append(
            {"backend": name, "tokens/s (median)": median[name], "least": min(rates), "most": max(rates)}
        )
    report.ratios["tokens_per_second"] = median[OMNI] / median[PLAIN]
    report.ratios["tokens_per_second_to_in_process"] = median[OMNI] / median[INSIDE]
    report.notes.append("ratios are those of the medians; all tokens were equal")
    report.finish(args.output)


if __name__ == "__main__":
    main()
