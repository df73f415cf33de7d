# SPDX-License-Identifier: Apache-2.0
"""Is what a caller gets the same, whoever else is there? Many random requests to tiny checkpoints, in float32.

    python benchmarks/exactness.py [--models NAME ...] [--size default|large] [--seconds N] [--seed N]
                                   [--output FILE.json] [--quick]

Each model runs as its stage configuration says, windows included, with the talker's codes as one more output. Crowds of
random requests come to it: all kinds of prompts, lengths, voices and modalities, greedy and sampled, at random times;
some callers leave early. Afterwards each request is made again, alone. Text and codes must be equal, and waves within
1e-4. Some of the greedy ones are also put to HF transformers. Qwen2.5-Omni makes another wave for callers who listen
along, so that HF's is compared with what others get. Exit status 1: a difference.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from report import Report, make_parser, progress
from transformers.utils import logging
from wishes import CODES, Answer, Wish, ask, ask_crowd, ask_reference, make_wish

from vllm_omni import AsyncOmniLLM
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

MAX_CROWD = 8
MODALITIES = (None, ("text",), ("audio",), ("text", "audio"), ("audio", CODES))
SPREAD_S = 0.6
ONE_IN_REFERENCE = 3
"""Of the greedy requests, how many HF transformers is asked about."""


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        talker_tokens: The longest speech, in codes.
        top_k, top_p: The talker's, by its authors.
        modalities: That are asked for; None is all that the pipeline has.
        streamed_wave_differs: From that for callers who do not listen along, by design.
    """

    name: str
    talker_tokens: int
    top_k: int
    top_p: float
    streamed_wave_differs: bool
    modalities: tuple[tuple[str, ...] | None, ...] = MODALITIES


MODELS = {
    "qwen2_5_omni": Model("qwen2_5_omni", 90, top_k=40, top_p=0.8, streamed_wave_differs=True),
    "qwen3_omni_moe": Model("qwen3_omni_moe", 50, top_k=50, top_p=1.0, streamed_wave_differs=False),
}


@dataclass
class Service:
    """One checkpoint, served, and its reference."""

    model: Model
    checkpoint: Path
    llm: AsyncOmniLLM
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
def serve(model: Model, size: str = "default", checkpoint_seed: int = 0) -> Iterator[Service]:
    """Writes a checkpoint, starts its pipeline and loads its reference."""
    config = yaml.safe_load((stage_configs_dir() / f"{model.name}.yaml").read_text())
    config["stage_args"][1] |= {"final_output": True, "final_output_type": CODES}
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(model.name, Path(folder) / "model", size=size, seed=checkpoint_seed)
        file = Path(folder) / "pipeline.yaml"
        file.write_text(yaml.safe_dump(config))
        limits = {"max_model_len": 1024, "max_num_seqs": MAX_CROWD, "kv_cache_memory_bytes": 64 << 20}
        with AsyncOmniLLM(str(path), str(file), dtype="float32", **limits) as llm:
            yield Service(model, path, llm, HFOracle(path, num_threads=1))


def run_round(service: Service, rng: random.Random, findings: Findings) -> None:
    """One crowd, then each of its requests alone, and some of them put to the reference."""
    model = service.model
    wishes = [make_wish(rng, model.talker_tokens, SPREAD_S, model.modalities) for _ in range(rng.randint(2, MAX_CROWD))]
    prompts = [wish.prompt(service.checkpoint) for wish in wishes]
    params = [wish.sampling_params(model.top_k, model.top_p) for wish in wishes]
    answers = asyncio.run(ask_crowd(service.llm, list(zip(wishes, prompts, params, strict=True))))
    findings.requests += len(wishes)
    for wish, prompt, param, answer in zip(wishes, prompts, params, answers, strict=True):
        if answer is None:
            findings.left += 1
            continue
        alone = asyncio.run(ask(service.llm, prompt, param, wish))
        assert alone is not None
        findings.alone += 1
        findings.tokens += len(answer.text or []) + len(answer.codes or [])
        distance = findings.compare(wish, answer, alone, "with others and alone")
        findings.wave_distance = max(findings.wave_distance, distance)
        if wish.seed is None and rng.randrange(ONE_IN_REFERENCE) == 0:
            compare_to_reference(service, wish, answer, findings)


def compare_to_reference(service: Service, wish: Wish, answer: Answer, findings: Findings) -> None:
    prompt = wish.prompt(service.checkpoint)
    expected = ask_reference(service.oracle, prompt, wish)
    findings.reference += 1
    if wish.stream and service.model.streamed_wave_differs and answer.audio is not None:
        findings.compare(wish, replace(answer, audio=None), expected, "streamed and HF")
        wish = replace(wish, stream=False)
        params = wish.sampling_params(service.model.top_k, service.model.top_p)
        whole = asyncio.run(ask(service.llm, prompt, params, wish))
        assert whole is not None
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
        with serve(MODELS[name], args.size, args.seed) as service:
            rng, deadline = random.Random(args.seed), time.monotonic() + seconds
            while time.monotonic() < deadline:
                run_round(service, rng, findings)
        progress(f"{name}: {findings.requests} requests, {len(findings.differences)} differences")
        report.rows.append(findings.row())
        report.notes += findings.differences
    report.finish(args.output)
    return 1 if report.notes else 0


if __name__ == "__main__":
    sys.exit(main())
