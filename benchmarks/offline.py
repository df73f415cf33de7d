# SPDX-License-Identifier: Apache-2.0
"""Speech from prompts, offline: HF transformers against `OmniLLM`, in one run, round by round.

    python benchmarks/offline.py [--model DIR] [--concurrency 1 8] [--output FILE.json] [--quick]

Both answer the same prompts (text, image, audio and video in turn) with the same weights, greedily in
float32, and at the same length: so many text tokens, so many frames of speech. As many prompts as
`--concurrency` says come at once, and the next ones when those are done. HF works on one after the other, on
one thread, and also on as many as a trial finds to be clearly faster; we are compared with the better of these.
Without `--model` two checkpoints with random weights are measured: the default tiny one, where overhead
decides, and the large one, where computing does.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from contestants import (
    Contestant,
    Figures,
    HFContestant,
    Load,
    OmniContestant,
    Prompts,
    check_replies,
    hf_contestants,
)
from report import Report, make_parser, mean, percentile, progress
from transformers.utils import logging

from vllm_omni import OmniLLM
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import mixed_prompts
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

DEFAULT, LARGE = "default", "large"


@dataclass(frozen=True)
class Match:
    """One checkpoint, up and running on both sides."""

    label: str
    load: Load
    prompts: Prompts
    oracle: HFOracle
    llm: OmniLLM


def start(models: dict[str, Path], by_size: dict[str, Load], concurrency: int, stack: ExitStack) -> list[Match]:
    """Starts all pipelines at the same time, and loads what HF needs meanwhile. An idle pipeline costs no time."""
    with ThreadPoolExecutor(len(models)) as pool:
        starting = {label: pool.submit(_start_pipeline, model, concurrency) for label, model in models.items()}
        oracles = {label: HFOracle(model) for label, model in models.items()}
    llms = {label: stack.enter_context(future.result()) for label, future in starting.items()}
    return [
        Match(label, load, mixed_prompts(models[label], load.num_prompts(concurrency)), oracles[label], llms[label])
        for label, load in by_size.items()
        if label in models
    ]


def _start_pipeline(model: Path, concurrency: int) -> OmniLLM:
    return OmniLLM(str(model), dtype="float32", max_model_len=1024, max_num_seqs=concurrency)


def play(match: Match, concurrencies: list[int], report: Report) -> None:
    """Runs all contestants on one checkpoint and adds rows, ratios and a note to the report."""
    label, load, prompts = match.label, match.load, match.prompts
    progress(f"{label}: warming up")
    hf = hf_contestants(match.oracle, load, prompts)
    ours = [OmniContestant(match.llm, load, concurrency) for concurrency in concurrencies]
    run_rounds(label, [*hf, *ours], prompts, load.rounds)
    check_replies(hf[0], [*hf, *ours])
    add_results(label, load, hf, ours, report)


def run_rounds(label: str, contestants: list[Contestant], prompts: Prompts, rounds: int) -> None:
    for contestant in contestants:
        contestant.warm_up(prompts)
    for number in range(1, rounds + 1):
        progress(f"{label}: round {number} of {rounds}")
        for contestant in contestants:
            contestant.run(prompts)


def add_results(label: str, load: Load, hf: list[HFContestant], ours: list[OmniContestant], report: Report) -> None:
    best = max(hf, key=lambda contestant: contestant.figures(1).requests_per_second)
    for one in ours:
        for reference in hf:
            add_row(report, label, reference.name, one.concurrency, reference.figures(one.concurrency))
        add_row(report, label, one.name, one.concurrency, one.figures())
        add_ratios(report, label, one.concurrency, one.figures().ratios_to(best.figures(one.concurrency)))
    report.notes.append(
        f"{label}: {load.text_tokens} text tokens and {load.talker_tokens - 1} frames for each prompt, {load.rounds} "
        f"round(s); ratios are to {best.name}, its best; all gave the same text tokens and wave lengths"
    )


def add_row(report: Report, label: str, who: str, concurrency: int, figures: Figures) -> None:
    report.rows.append(
        {
            "size": label,
            "who": who,
            "at once": concurrency,
            "requests/s": figures.requests_per_second,
            "JCT mean s": mean(figures.jct),
            "JCT p95 s": percentile(figures.jct, 95),
            "audio s/s": figures.audio_seconds_per_second,
        }
    )


def add_ratios(report: Report, label: str, concurrency: int, ratios: dict[str, float]) -> None:
    """Names end in the concurrency; those of the large size begin with `large_`."""
    prefix = "large_" if label == LARGE else ""
    report.ratios |= {f"{prefix}{name}_c{concurrency}": value for name, value in ratios.items()}


def loads(quick: bool) -> dict[str, Load]:
    """By size of the checkpoint; a model of the user's own is measured like the default."""
    if quick:
        default = Load(rounds=1, serial_prompts=4, waves=1, text_tokens=16, talker_tokens=33)
        return {DEFAULT: default, LARGE: Load(rounds=1, serial_prompts=2, waves=1, text_tokens=8, talker_tokens=17)}
    default = Load(rounds=5, serial_prompts=8, waves=2, text_tokens=24, talker_tokens=65)
    return {DEFAULT: default, LARGE: Load(rounds=3, serial_prompts=4, waves=2, text_tokens=24, talker_tokens=65)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, help="a Qwen3-Omni checkpoint; default: the tiny ones, both sizes")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at once (default 1 8)")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = Report("offline", {"quick": str(args.quick)})
    with ExitStack() as stack:
        models = {DEFAULT: args.model} if args.model else _write_models(stack)
        progress("starting " + " and ".join(models))
        for match in start(models, loads(args.quick), max(args.concurrency), stack):
            # One at a time the large size takes long; a quick run has no time for it.
            hurried = args.quick and match.label == LARGE
            play(match, [max(args.concurrency)] if hurried else args.concurrency, report)
    report.finish(args.output)


def _write_models(stack: ExitStack) -> dict[str, Path]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return {size: write_tiny_checkpoint("qwen3_omni_moe", folder / size, size=size) for size in (DEFAULT, LARGE)}


if __name__ == "__main__":
    main()
