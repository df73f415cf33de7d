# SPDX-License-Identifier: Apache-2.0
"""Speech as it is made: streaming against the full hand-over, and against HF transformers, in one run.

    python benchmarks/streaming.py [--models NAME ...] [--sizes default large] [--concurrency 1 4 8]
                                   [--output FILE.json] [--quick]

For each model two pipelines answer the same prompts (text, image, audio and video in turn), greedily in float32, at the
same length: 10 seconds of speech. One streams as its stage configuration says; in the other every stage hands its whole
result over at once. As many callers as the concurrency says send a request each, and the next one when it is done. HF
transformers answers one after the other. Weights are random; the large size is measured against HF only.

TTFT, TTFA: time to the first token, and to the first piece of speech. RTF: seconds for each second of speech. A gap is
the time between two pieces. Underrun: seconds of silence for a listener who plays from the first piece on.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from contestants import HFContestant, Load, hf_contestants, sampling_params
from listeners import Asker, Listening, Session, run_session
from report import Report, make_parser, percentile, progress
from transformers.utils import logging

from vllm_omni import AsyncOmniLLM
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import mixed_prompts
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

SAMPLE_RATE = 24_000
STREAMING, WHOLE, FULL = "streaming", "not listening along", "full hand-over"


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        name: Of the tiny checkpoint, and of the stage configuration.
        codes_per_second: The talker's tokens for a second of speech.
        extra_tokens: Sampled beyond those that are spoken.
    """

    name: str
    codes_per_second: float
    extra_tokens: int

    def load(self, speech_seconds: float, text_tokens: int, serial_prompts: int) -> Load:
        talker_tokens = round(self.codes_per_second * speech_seconds) + self.extra_tokens
        return Load(1, serial_prompts, 1, text_tokens, talker_tokens)


MODELS = {
    "qwen2_5_omni": Model("qwen2_5_omni", codes_per_second=50, extra_tokens=0),
    "qwen3_omni_moe": Model("qwen3_omni_moe", codes_per_second=12.5, extra_tokens=1),
}


@dataclass
class Plan:
    """How much is measured: rounds, waves of requests for each concurrency, and HF's requests."""

    rounds: int
    waves: int
    speech_seconds: float
    text_tokens: int
    hf_prompts: int
    sizes: list[str]
    concurrencies: list[int]


@dataclass
class Tally:
    """All sessions of one contestant at one concurrency."""

    sessions: list[Session] = field(default_factory=list)

    @property
    def requests_per_second(self) -> float:
        return sum(len(s.listenings) for s in self.sessions) / sum(s.seconds for s in self.sessions)

    @property
    def listenings(self) -> list[Listening]:
        return [listening for session in self.sessions for listening in session.listenings]

    def p50_first_audio(self) -> float:
        return percentile([listening.first_audio for listening in self.listenings], 50)

    def row(self) -> dict[str, float]:
        heard = self.listenings
        first_audio = [listening.first_audio for listening in heard]
        gaps = [gap for listening in heard for gap in listening.gaps] or [0.0]
        return {
            "requests/s": self.requests_per_second,
            "TTFT p50 s": percentile([listening.first_text for listening in heard], 50),
            "TTFA p50 s": percentile(first_audio, 50),
            "TTFA p95 s": percentile(first_audio, 95),
            "RTF p50": percentile([listening.real_time_factor for listening in heard], 50),
            "gap p95 s": percentile(gaps, 95),
            "underrun p95 s": percentile([listening.underrun for listening in heard], 95),
        }


@contextmanager
def start(model: Model, path: Path, names: list[str], max_num_seqs: int) -> Iterator[dict[str, AsyncOmniLLM]]:
    """The pipelines of one checkpoint. An idle one costs no time."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        configs = {STREAMING: None, FULL: str(_write_full_hand_over(model, folder))}
        yield {
            name: stack.enter_context(
                AsyncOmniLLM(str(path), configs[name], dtype="float32", max_model_len=2048, max_num_seqs=max_num_seqs)
            )
            for name in names
        }


def _write_full_hand_over(model: Model, folder: Path) -> Path:
    """The model's stage configuration without windows."""
    config = yaml.safe_load((stage_configs_dir() / f"{model.name}.yaml").read_text())
    config["runtime"].pop("edges")
    path = folder / "full.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def play(model: Model, size: str, plan: Plan, report: Report) -> None:
    """One checkpoint: all its contestants, round by round."""
    label = f"{model.name} {size}"
    names = [STREAMING, FULL] if size == "default" else [STREAMING]
    concurrencies = plan.concurrencies if size == "default" else [1, max(plan.concurrencies)]
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(model.name, Path(folder) / "model", size=size)
        progress(f"{label}: starting {' and '.join(names)}")
        with start(model, path, names, max(plan.concurrencies)) as llms:
            load = model.load(plan.speech_seconds, plan.text_tokens, plan.hf_prompts)
            prompts = mixed_prompts(path, max(plan.waves * max(plan.concurrencies), plan.hf_prompts))
            hf = hf_contestants(HFOracle(path), load, prompts)
            askers = make_askers(llms, load)
            tallies = measure(label, askers, hf, prompts, plan, concurrencies)
    add_results(model, size, tallies, hf, concurrencies, report)


def make_askers(llms: dict[str, AsyncOmniLLM], load: Load) -> dict[str, Asker]:
    params = sampling_params(load)
    askers = {name: Asker(llm, params, SAMPLE_RATE) for name, llm in llms.items()}
    return askers | {WHOLE: Asker(llms[STREAMING], params, SAMPLE_RATE, streams=False)}


def measure(
    label: str,
    askers: dict[str, Asker],
    hf: list[HFContestant],
    prompts: list[dict[str, Any]],
    plan: Plan,
    concurrencies: list[int],
) -> dict[tuple[str, int], Tally]:
    tallies = {(name, concurrency): Tally() for concurrency in concurrencies for name in askers}
    progress(f"{label}: warming up")
    for asker in askers.values():
        run_session(asker, prompts[: max(concurrencies)], max(concurrencies))
    for number in range(1, plan.rounds + 1):
        progress(f"{label}: round {number} of {plan.rounds}")
        for (name, concurrency), tally in tallies.items():
            waves = plan.waves * max(1, max(concurrencies) // concurrency // 2)
            chosen = prompts[: waves * concurrency]
            tally.sessions.append(run_session(askers[name], chosen, concurrency))
    progress(f"{label}: HF transformers")
    for contestant in hf:
        contestant.run(prompts)
    check(label, tallies, hf[0])
    return tallies


def check(label: str, tallies: dict[tuple[str, int], Tally], hf: HFContestant) -> None:
    """
    Raises:
        ValueError: Somebody said something else than HF.
    """
    for (name, concurrency), tally in tallies.items():
        for session in tally.sessions:
            for index, listening in enumerate(session.listenings):
                reply = hf.replies.get(index)
                if reply is not None and (listening.token_ids, listening.samples) != (reply.token_ids, reply.samples):
                    raise ValueError(f"{label}, prompt {index}: {name} at {concurrency} answered differently from HF")


def add_results(
    model: Model,
    size: str,
    tallies: dict[tuple[str, int], Tally],
    hf: list[HFContestant],
    concurrencies: list[int],
    report: Report,
) -> None:
    best = max(contestant.figures(1).requests_per_second for contestant in hf)
    for (name, concurrency), tally in tallies.items():
        report.rows.append({"model": model.name, "size": size, "who": name, "at once": concurrency, **tally.row()})
    for contestant in hf:
        empty = dict.fromkeys(Tally([Session(1.0, [_SILENT])]).row(), "")
        speed = {"requests/s": contestant.figures(1).requests_per_second}
        report.rows.append({"model": model.name, "size": size, "who": contestant.name, "at once": 1, **empty, **speed})
    large = "large_" if size != "default" else ""
    for concurrency in {concurrencies[0], concurrencies[-1]}:
        ours = tallies[STREAMING, concurrency]
        report.ratios[f"{model.name}_vs_hf_{large}c{concurrency}"] = (
            tallies[WHOLE, concurrency].requests_per_second / best
        )
        if (FULL, concurrency) in tallies:
            full = tallies[FULL, concurrency]
            report.ratios[f"{model.name}_ttfa_c{concurrency}"] = ours.p50_first_audio() / full.p50_first_audio()
            report.ratios[f"{model.name}_throughput_c{concurrency}"] = (
                ours.requests_per_second / full.requests_per_second
            )


_SILENT = Listening(SAMPLE_RATE, chunks=[(0.0, 0.0)], samples=1)


def make_plan(args: Any) -> Plan:
    rounds, waves, hf_prompts = (1, 1, 2) if args.quick else (2, 2, 4)
    return Plan(rounds, waves, 10.0, 40, hf_prompts, args.sizes, sorted(args.concurrency))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", choices=["default", "large"], default=["default", "large"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8], help="callers (default 1 4 8)")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    plan = make_plan(args)
    report = Report("streaming", {"quick": str(args.quick), "speech": f"{plan.speech_seconds:g} s"})
    for name in args.models:
        for size in plan.sizes:
            play(MODELS[name], size, plan, report)
    report.notes.append("TTFA ratios: lower is better; all others: higher is better")
    report.finish(args.output)


if __name__ == "__main__":
    main()
