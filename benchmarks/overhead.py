# SPDX-License-Identifier: Apache-2.0
"""What the pipeline costs: one text-only stage through `OmniLLM` against plain `vllm.LLM`.

    python benchmarks/overhead.py [--model DIR] [--output FILE.json] [--quick]

Both run the same model with the same engine arguments on the same batch of 32 prompts, in turns in one run.
All answers have the same length, and are compared.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Report, make_parser, percentile
from transformers.utils import logging
from vllm import LLM, SamplingParams

from vllm_omni import OmniLLM
from vllm_omni.testing.media import make_prompt
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

BATCH = 32
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": BATCH,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
}


class Contestant:
    """Answers the batch, and keeps count."""

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


def measure(model: Path, tokens: int, rounds: int) -> tuple[Contestant, Contestant]:
    """Plain vLLM and us, in turns; the first round of each warms up and is not counted."""
    prompts = [make_prompt(model, "text", seed) for seed in range(BATCH)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    plain_llm = LLM(model=str(model), **ENGINE_ARGS)
    with OmniLLM(str(model), **ENGINE_ARGS) as omni_llm:
        plain = Contestant("vllm.LLM", lambda batch: plain_llm.generate(batch, params, use_tqdm=False))
        omni = Contestant("OmniLLM", lambda batch: omni_llm.generate(batch, [params], use_tqdm=False))
        for _ in range(1 + rounds):
            plain.run(prompts)
            omni.run(prompts)
    for contestant in (plain, omni):
        del contestant.rates[0]
    return plain, omni


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
        plain, omni = measure(model, tokens, rounds)
    if plain.token_ids != omni.token_ids:
        sys.exit("not comparable: the two gave different tokens")
    report = Report("overhead", {"batch": BATCH, "tokens": tokens, "rounds": rounds, "quick": str(args.quick)})
    for contestant in (plain, omni):
        rates = contestant.rates
        report.rows.append(
            {
                "who": contestant.name,
                "tokens/s (median)": percentile(rates, 50),
                "least": min(rates),
                "most": max(rates),
            }
        )
    report.ratios["tokens_per_second"] = percentile(omni.rates, 50) / percentile(plain.rates, 50)
    report.notes.append("the ratio is that of the medians; all tokens were equal")
    report.finish(args.output)


if __name__ == "__main__":
    main()
