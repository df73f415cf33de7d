# SPDX-License-Identifier: Apache-2.0
"""Latency of speech: segments streamed between stages, full hand-over, and HF transformers, in one run, in turns.

    python benchmarks/streaming.py [--models NAME ...] [--sizes default large] [--concurrency 1 8 32]
                                   [--output FILE.json] [--quick]
    python benchmarks/streaming.py --part conversations [--conversations 16]
    python benchmarks/streaming.py --part large [--layers N] [--experts N] [--tiny]
    python benchmarks/streaming.py --part efficiency
    python benchmarks/streaming.py --part deaths [--kills N]

For each model two pipelines get the same prompts (text, image, audio and video in turn), greedily in float32, and make
10 seconds of speech for each (3 with `--quick`). One streams as its stage configuration has it; in the other every
stage hands over its whole result. Each of `--concurrency` clients sends its next request when the last one is done.
HF makes the whole speech before any of it can be played; of requests that are sent together, each waits for those
before it. Weights are random. The other parts are described in `conversations.py`, `large_omni.py`, `efficiency.py` and
`stage_deaths.py`.

tokens/s, sound s/s: tokens of text, and seconds of speech, made in a second. TTFT, TTFA: time to the first token, and
to the first segment of speech. RTF: seconds for each second of speech. A gap is the time between two segments.
Underrun: seconds of silence for a client that plays from the first segment on; "underran" is the share of clients that
had any.
"""

from argparse import Namespace
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import conversations
import efficiency
import large_omni
import stage_deaths
import yaml
from backends import (
    CODES,
    HF_PROMPTS,
    TEXT_TOKENS,
    Client,
    HFBackend,
    Load,
    Measurement,
    Plan,
    hf_backends,
    row_of,
    sampling_params,
)
from report import Report, make_parser, parse, progress, tiny_checkpoint

from vllm_omni import AsyncOmniLLM
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import mixed_prompts

STREAMING, WHOLE, FULL = "streaming", "streaming, client does not stream", "full hand-over"


def start_hf(model: str, path: Path, plan: Plan) -> list[HFBackend]:
    load = Load(plan.rounds, HF_PROMPTS, 1, TEXT_TOKENS, plan.talker_tokens(model))
    return hf_backends(HFOracle(path), load, mixed_prompts(path, HF_PROMPTS))


def start(model: str, path: Path, plan: Plan, stack: ExitStack) -> dict[str, Client]:
    """Both pipelines of one checkpoint. An idle one costs no time."""
    config = yaml.safe_load((stage_configs_dir() / f"{model}.yaml").read_text())
    config["runtime"].pop("edges")
    full = path.with_name("full.yaml")
    full.write_text(yaml.safe_dump(config))
    llms = {
        name: stack.enter_context(
            AsyncOmniLLM(str(path), file, dtype="float32", max_model_len=2048, max_num_seqs=max(plan.concurrencies))
        )
        for name, file in ((STREAMING, None), (FULL, str(full)))
    }
    params = sampling_params(TEXT_TOKENS, plan.talker_tokens(model))
    clients = {name: Client(llm, params, streams=True) for name, llm in llms.items()}
    return clients | {WHOLE: Client(llms[STREAMING], params, streams=False)}


def measure(model: str, size: str, plan: Plan, report: Report) -> None:
    """One checkpoint: all clients, round by round. The first round warms up."""
    label = f"{model} {size}"
    measurements: dict[tuple[str, int], Measurement] = defaultdict(Measurement)
    with ExitStack() as stack:
        path = stack.enter_context(tiny_checkpoint(model, size))
        progress(f"{label}: starting")
        clients = start(model, path, plan, stack)
        hf = start_hf(model, path, plan)
        for number in range(1 + plan.rounds):
            progress(f"{label}: round {number} of {plan.rounds}" if number else f"{label}: warming up")
            for concurrency in plan.concurrencies if number else plan.concurrencies[-1:]:
                prompts = mixed_prompts(path, max(4, concurrency))
                for name, client in clients.items():
                    seconds, responses = client.run(prompts, concurrency)
                    if number:
                        measurements[name, concurrency].seconds += seconds
                        measurements[name, concurrency].responses += responses
            for backend in hf if number else ():
                backend.run(mixed_prompts(path, HF_PROMPTS))
    check_responses(label, measurements)
    best = max(hf, key=lambda backend: backend.figures(1).requests_per_second)
    for (name, concurrency), measurement in measurements.items():
        report.rows.append({"model": label, "client": name, "concurrency": concurrency, **measurement.row()})
    for concurrency in plan.concurrencies:
        ours, full = (measurements[name, concurrency] for name in (STREAMING, FULL))
        hf_row = row_of(best.figures(concurrency), plan)
        report.rows.append({"model": label, "client": best.name, "concurrency": concurrency, **hf_row})
        suffix = f"{'_large' if size == 'large' else ''}_c{concurrency}"
        report.ratios[f"{model}_ttfa{suffix}"] = ours.first_audio / full.first_audio
        report.ratios[f"{model}_throughput{suffix}"] = ours.requests_per_second / full.requests_per_second
        report.ratios[f"{model}_ttfa_speedup_to_hf{suffix}"] = hf_row["TTFA p50 s"] / ours.first_audio


def check_responses(label: str, measurements: dict[tuple[str, int], Measurement]) -> None:
    """
    Raises:
        ValueError: The clients at one concurrency received other tokens, or speech of another length.
    """
    for (name, concurrency), measurement in measurements.items():
        expected = measurements[FULL, concurrency].responses
        for index, (response, other) in enumerate(zip(measurement.responses, expected, strict=True)):
            if (response.token_ids, response.samples) != (other.token_ids, other.samples):
                raise ValueError(f"{label}, request {index}: {name} at {concurrency} differs from {FULL}")


def measure_segments(args: Namespace) -> Report:
    concurrencies, rounds, seconds = ([1, 4], 1, 3.0) if args.quick else ([1, 8, 32], 2, 10.0)
    plan = Plan(sorted(args.concurrency or concurrencies), rounds, seconds)
    report = Report("streaming", {"quick": str(args.quick), "speech": f"{plan.speech_seconds:g} s"})
    for model in args.models:
        for size in args.sizes or ["default"]:
            measure(model, size, plan, report)
    report.notes += [
        "ttfa, throughput: to the full hand-over; ttfa: lower is better, throughput: higher is better",
        "ttfa_speedup_to_hf: first sound of HF, on its better number of threads, which is all of it, over ours",
    ]
    return report


PARTS = {
    "segments": measure_segments,
    "conversations": conversations.measure_all,
    "large": large_omni.measure,
    "efficiency": efficiency.measure,
    "deaths": stage_deaths.measure,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, default="segments", help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, nargs="+", help="clients (default 1 8 32, or 1 8 64 of large)")
    of_tiny = parser.add_argument_group("segments, conversations, efficiency")
    of_tiny.add_argument("--models", nargs="+", choices=list(CODES), default=list(CODES))
    sizes = "default: both; of segments the default one, of efficiency with --quick the large one"
    of_tiny.add_argument("--sizes", nargs="+", choices=["default", "large"], help=sizes)
    of_tiny.add_argument("--conversations", type=int, help="at once (default 16; 4 with --quick)")
    of_large = parser.add_argument_group("large")
    of_large.add_argument("--layers", type=int, help="of the thinker (default: what fits)")
    of_large.add_argument("--experts", type=int, help="of each layer of the thinker (default: what fits)")
    of_large.add_argument("--tiny", action="store_true", help="the tiny checkpoint in float32, on a CPU too")
    parser.add_argument("--kills", type=int, help="of deaths (default 100; 6 with --quick)")
    args = parse(parser)
    PARTS[args.part](args).finish(args.output)


if __name__ == "__main__":
    main()
