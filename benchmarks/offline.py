# SPDX-License-Identifier: Apache-2.0
"""Speech and images from prompts, offline: a model's reference against `OmniLLM`, in one run, round by round.

    python benchmarks/offline.py [--model DIR | --checkpoint NAME] [--concurrency 1 8] [--output FILE.json] [--quick]
    python benchmarks/offline.py --checkpoint qwen3_tts [--reference-python QWEN_TTS/bin/python]
    python benchmarks/offline.py --checkpoint transformers

Both get the same prompts and weights, greedily in float32. `--concurrency` prompts are sent at once, and the next ones
when those are done; the reference runs one after the other. Without `--model` two checkpoints with random weights are
measured: the default tiny one, where overhead decides, and the large one, where computing does.

An omni model is compared with HF transformers: text, image, audio and video in turn, results of the same length, a
number of text tokens and of frames of speech. HF runs on one thread, and also on as many as a trial finds to be clearly
faster; the ratios are to the better of these. For models of speech or of images, and for the speech classes of
transformers (`--checkpoint transformers`), see `references.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import references
import torch
from backends import Figures, HFBackend, Load, OmniBackend, Prompts, check_results, hf_backends
from report import Report, make_parser, mean, parse, percentile, progress, tiny_checkpoint

from vllm_omni import OmniLLM
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import mixed_prompts

DEFAULT, LARGE = "default", "large"
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Comparison:
    """One checkpoint, loaded by both backends."""

    label: str
    load: Load
    prompts: Prompts
    oracle: HFOracle
    llm: OmniLLM


def start(models: dict[str, Path], by_size: dict[str, Load], concurrency: int, stack: ExitStack) -> list[Comparison]:
    """Starts all pipelines at the same time, and loads HF's models meanwhile. An idle pipeline costs no time."""
    with ThreadPoolExecutor(len(models)) as pool:
        starting = {label: pool.submit(_start_pipeline, model, concurrency) for label, model in models.items()}
        oracles = {label: HFOracle(model) for label, model in models.items()}
    llms = {label: stack.enter_context(future.result()) for label, future in starting.items()}
    return [
        Comparison(
            label, load, mixed_prompts(models[label], load.num_prompts(concurrency)), oracles[label], llms[label]
        )
        for label, load in by_size.items()
        if label in models
    ]


def _start_pipeline(model: Path, concurrency: int) -> OmniLLM:
    return OmniLLM(str(model), dtype="float32", max_model_len=1024, max_num_seqs=concurrency)


def measure(comparison: Comparison, concurrencies: list[int], report: Report) -> None:
    """Runs all backends on one checkpoint and adds rows, ratios and a note to the report."""
    label, load, prompts = comparison.label, comparison.load, comparison.prompts
    progress(f"{label}: warming up")
    hf = hf_backends(comparison.oracle, load, prompts)
    ours = [OmniBackend(comparison.llm, load, concurrency) for concurrency in concurrencies]
    backends: list[HFBackend | OmniBackend] = [*hf, *ours]
    for backend in backends:
        backend.warm_up(prompts)
    for number in range(load.rounds):
        progress(f"{label}: round {number + 1} of {load.rounds}")
        for backend in backends:
            backend.run(prompts)
    check_results(hf[0], backends)
    add_results(label, load, hf, ours, report)


def add_results(label: str, load: Load, hf: list[HFBackend], ours: list[OmniBackend], report: Report) -> None:
    best = max(hf, key=lambda backend: backend.figures(1).requests_per_second)
    prefix = "large_" if label == LARGE else ""
    for one in ours:
        for baseline in hf:
            add_row(report, label, baseline.name, one.concurrency, baseline.figures(one.concurrency))
        add_row(report, label, one.name, one.concurrency, one.figures())
        ratios = one.figures().ratios_to(best.figures(one.concurrency))
        report.ratios |= {f"{prefix}{name}_c{one.concurrency}": value for name, value in ratios.items()}
    report.notes.append(
        f"{label}: {load.text_tokens} text tokens and {load.talker_tokens - 1} frames for each prompt, {load.rounds} "
        f"round(s); ratios are to {best.name}, its best; all made the same text tokens and wave lengths"
    )


def add_row(report: Report, label: str, backend: str, concurrency: int, figures: Figures) -> None:
    report.rows.append(
        {
            "size": label,
            "backend": backend,
            "concurrency": concurrency,
            "requests/s": figures.requests_per_second,
            "JCT mean s": mean(figures.jct),
            "JCT p95 s": percentile(figures.jct, 95),
            "audio s/s": figures.audio_seconds_per_second,
        }
    )


def loads(quick: bool) -> dict[str, Load]:
    """By size of the checkpoint; a model of the user's own is measured like the default."""
    if quick:
        default = Load(rounds=1, serial_prompts=4, waves=1, text_tokens=16, talker_tokens=33)
        return {DEFAULT: default, LARGE: Load(rounds=1, serial_prompts=2, waves=1, text_tokens=8, talker_tokens=17)}
    default = Load(rounds=5, serial_prompts=8, waves=2, text_tokens=24, talker_tokens=65)
    return {DEFAULT: default, LARGE: Load(rounds=3, serial_prompts=4, waves=2, text_tokens=24, talker_tokens=65)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, help="an omni model; default: --checkpoint, in both sizes")
    choices = ["qwen3_omni_moe", "qwen2_5_omni", *references.CHECKPOINTS, TRANSFORMERS]
    checkpoint_help = "a tiny one (default %(default)s); transformers: one of each speech class that it runs itself"
    parser.add_argument("--checkpoint", choices=choices, default=choices[0], help=checkpoint_help)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at once (default 1 8)")
    parser.add_argument("--reference-python", type=Path, metavar="PATH", help="of an environment with qwen-tts")
    args = parse(parser)
    report = Report("offline", {"model": str(args.model or args.checkpoint), "quick": str(args.quick)})
    with ExitStack() as stack:
        models = {DEFAULT: args.model}
        if args.model is None and args.checkpoint == TRANSFORMERS:
            torch.set_num_threads(1)
            references.measure_speech_classes(args.concurrency, 1 if args.quick else 5, report)
            report.finish(args.output)
            return
        if args.model is None:
            models = {size: stack.enter_context(tiny_checkpoint(args.checkpoint, size)) for size in (DEFAULT, LARGE)}
        if args.model is None and args.checkpoint in references.CHECKPOINTS:
            torch.set_num_threads(1)
            family = references.make_family(args.checkpoint, args.reference_python)
            for size, model in models.items():
                references.measure(family, size, model, args.concurrency, 1 if args.quick else 5, report)
        else:
            progress("starting " + " and ".join(models))
            for comparison in start(models, loads(args.quick), max(args.concurrency), stack):
                # One at a time the large size takes too long for a quick run.
                is_short = args.quick and comparison.label == LARGE
                measure(comparison, [max(args.concurrency)] if is_short else args.concurrency, report)
    report.finish(args.output)


if __name__ == "__main__":
    main()
