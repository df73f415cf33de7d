# SPDX-License-Identifier: Apache-2.0
"""Is what a caller gets the same, whoever else is there? Many random requests to tiny checkpoints, in float32.

    python benchmarks/exactness.py [--models NAME ...] [--size default|large] [--seconds N] [--seed N]
                                   [--output FILE.json] [--quick]

Each model runs as its stage configuration says, windows included, with the talker's codes as one more output. Crowds of
random requests come to it: all kinds of prompts, lengths, voices and modalities, greedy and sampled, at random times;
some callers leave early. Afterwards each request is made again, alone. Text and codes must be equal, and waves within
1e-4. The greedy ones are also put to HF transformers. Qwen2.5-Omni's wave depends on the windows that it is made in, so
that HF's is compared with that of a second pipeline, whose vocoder waits for all codes. Exit status 1: a difference.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from report import Report, make_parser, progress
from transformers.utils import logging
from wishes import CODES, Answer, Wish, ask, ask_crowd, ask_reference, make_wish

from vllm_omni import AsyncOmniLLM
from vllm_omni.config.paths import stage_configs_dir
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

MAX_CROWD = 8
SPREAD_S = 0.6
ONE_IN_REFERENCE = 3
"""Of the greedy requests, how many HF transformers is asked about."""


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        talker_tokens: The longest speech, in codes.
        top_k, top_p: The talker's, by its authors.
        wave_needs_all_codes: A wave made in windows differs from that made in one piece.
    """

    name: str
    talker_tokens: int
    top_k: int
    top_p: float
    wave_needs_all_codes: bool


MODELS = {
    "qwen2_5_omni": Model("qwen2_5_omni", 90, top_k=40, top_p=0.8, wave_needs_all_codes=True),
    "qwen3_omni_moe": Model("qwen3_omni_moe", 50, top_k=50, top_p=1.0, wave_needs_all_codes=False),
}


@dataclass
class Pipelines:
    """One checkpoint, served.

    Attributes:
        windows: As it ships.
        whole_waves: Its vocoder waits for all codes; the same pipeline where that makes no difference.
    """

    model: Model
    checkpoint: Path
    windows: AsyncOmniLLM
    whole_waves: AsyncOmniLLM
    oracle: HFOracle


@dataclass
class Findings:
    """Of one model."""

    model: str
    requests: int = 0
    left: int = 0
    alone: int = 0
    reference: int = 0
    tokens: int = 0
    wave_distance: float = 0.0
    reference_wave_distance: float = 0.0
    differences: list[str] = field(default_factory=list)

    def row(self) -> dict[str, str | int | float]:
        return {
            "model": self.model,
            "requests": self.requests,
            "left early": self.left,
            "compared to alone": self.alone,
            "compared to HF": self.reference,
            "tokens": self.tokens,
            "largest wave difference": self.wave_distance,
            "to HF's": self.reference_wave_distance,
            "differences": len(self.differences),
        }

    def compare(self, wish: Wish, answer: Answer, other: Answer, whose: str) -> float:
        """Notes any difference; the distance of the waves."""
        difference = answer.difference_to(other)
        if difference is not None:
            self.differences.append(f"{self.model}, {whose}: {difference}: {wish}")
            progress(self.differences[-1])
        return answer.wave_distance(other)


@contextmanager
def serve(model: Model, size: str = "default", checkpoint_seed: int = 0) -> Iterator[Pipelines]:
    """Writes a checkpoint, starts its pipelines and loads its reference."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = write_tiny_checkpoint(model.name, folder / "model", size=size, seed=checkpoint_seed)

        def start(name: str, change: Callable[[dict], None]) -> AsyncOmniLLM:
            config = yaml.safe_load((stage_configs_dir() / f"{model.name}.yaml").read_text())
            config["stage_args"][1] |= {"final_output": True, "final_output_type": CODES}
            change(config)
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump(config))
            limits = {"max_model_len": 1024, "max_num_seqs": MAX_CROWD, "kv_cache_memory_bytes": 64 << 20}
            return stack.enter_context(AsyncOmniLLM(str(path), str(file), dtype="float32", **limits))

        windows = start("windows", lambda config: None)
        whole = start("whole", _without_vocoder_windows) if model.wave_needs_all_codes else windows
        yield Pipelines(model, path, windows, whole, HFOracle(path, num_threads=1))


def _without_vocoder_windows(config: dict) -> None:
    edges = config["runtime"]["edges"]
    config["runtime"]["edges"] = [edge for edge in edges if edge["to"] != 2]


def run_round(pipelines: Pipelines, rng: random.Random, findings: Findings) -> None:
    """One crowd, then each of its requests alone, and some of them put to the reference."""
    model = pipelines.model
    wishes = [make_wish(rng, model.talker_tokens, SPREAD_S) for _ in range(rng.randint(2, MAX_CROWD))]
    prompts = [wish.prompt(pipelines.checkpoint) for wish in wishes]
    params = [wish.sampling_params(model.top_k, model.top_p) for wish in wishes]
    answers = asyncio.run(ask_crowd(pipelines.windows, list(zip(wishes, prompts, params, strict=True))))
    findings.requests += len(wishes)
    for wish, prompt, param, answer in zip(wishes, prompts, params, answers, strict=True):
        if answer is None:
            findings.left += 1
            continue
        alone = asyncio.run(ask(pipelines.windows, prompt, param, wish))
        assert alone is not None
        findings.alone += 1
        findings.tokens += len(answer.text or []) + len(answer.codes or [])
        distance = findings.compare(wish, answer, alone, "with others and alone")
        findings.wave_distance = max(findings.wave_distance, distance)
        if wish.seed is None and rng.randrange(ONE_IN_REFERENCE) == 0:
            compare_to_reference(pipelines, wish, answer, findings)


def compare_to_reference(pipelines: Pipelines, wish: Wish, answer: Answer, findings: Findings) -> None:
    prompt = wish.prompt(pipelines.checkpoint)
    expected = ask_reference(pipelines.oracle, prompt, wish)
    findings.reference += 1
    if pipelines.whole_waves is not pipelines.windows and answer.audio is not None:
        params = wish.sampling_params(pipelines.model.top_k, pipelines.model.top_p)
        whole = asyncio.run(ask(pipelines.whole_waves, prompt, params, wish))
        assert whole is not None
        findings.compare(wish, Answer(answer.text, answer.codes), expected, "in windows and HF")
        answer = whole
    distance = findings.compare(wish, answer, expected, "here and HF")
    findings.reference_wave_distance = max(findings.reference_wave_distance, distance)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--size", choices=["default", "large"], default="default")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each model (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the checkpoint and of the requests (default 0)")
    args = parser.parse_args()
    logging.set_verbosity_error()
    seconds = min(args.seconds, 25.0) if args.quick else args.seconds
    report = Report("exactness", {"size": args.size, "seed": args.seed, "seconds": seconds})
    for name in args.models:
        findings = Findings(name)
        progress(f"{name}: starting")
        with serve(MODELS[name], args.size, args.seed) as pipelines:
            rng, deadline = random.Random(args.seed), time.monotonic() + seconds
            while time.monotonic() < deadline:
                run_round(pipelines, rng, findings)
        progress(f"{name}: {findings.requests} requests, {len(findings.differences)} differences")
        report.rows.append(findings.row())
        report.notes += findings.differences
    report.finish(args.output)
    return 1 if report.notes else 0


if __name__ == "__main__":
    sys.exit(main())
