# SPDX-License-Identifier: Apache-2.0
"""Where one step of a talker goes: scheduling, the host's bookkeeping, what is fed back, the backbone, sampling.

    python benchmarks/profile_talker.py [--model DIR ...] [--batch 1 8] [--size default] [--output FILE.json] [--quick]

The talker's engine runs in this process, alone, on rows of a thinker that does not exist: random numbers of the right
shape. Every method that a part consists of is timed while it runs. Without `--model` both models are measured, as
tiny checkpoints with random weights.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from report import Report, make_parser, progress
from step_parts import StepClock
from transformers import AutoTokenizer
from transformers.utils import logging
from vllm import SamplingParams
from vllm.transformers_utils.config import get_config

from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.testing.media import make_prompt
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

MODELS = ("qwen2_5_omni", "qwen3_omni_moe")
REPLY_TOKENS = 24
WARM_UP_STEPS = 5
ENGINE_ARGS = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16, "kv_cache_memory_bytes": 256 << 20}


class Talker:
    """A talker's engine, and inputs for it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._config = get_config(str(model), trust_remote_code=False)
        stages = load_pipeline_config(stage_configs_dir() / f"{self._config.model_type}.yaml").stage_args
        stage = next(stage for stage in stages if stage.kind == "AR" and stage.engine_input_source)
        self._processor = load_stage_input_processor(stage, str(model))
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        engine_args = create_engine_args(str(model), **(stage.engine_args | ENGINE_ARGS))
        self.engine = OmniLLMEngine.from_omni_engine_args(engine_args)

    def add(self, name: str, seed: int, frames: int, sampled: bool) -> None:
        """Gives the engine a request that ends after so many steps with a token."""
        made = self._make_input(name, seed)
        params = SamplingParams(
            temperature=0.9 if sampled else 0.0,
            top_k=50,
            repetition_penalty=1.05,
            max_tokens=frames,
            min_tokens=frames,
            stop_token_ids=made.stop_token_ids,
            detokenize=False,
        )
        prompt = {"prompt_token_ids": made.prompt_token_ids, "additional_information": made.additional_information}
        self.engine.add_request(name, prompt, params)

    def _make_input(self, name: str, seed: int) -> StageInput:
        prompt_ids = self._tokenizer(make_prompt(self._model, "text", seed)["prompt"])["input_ids"]
        torch.manual_seed(seed)
        width = self._config.thinker_config.text_config.hidden_size
        thought = StageOutput(
            request_id=name,
            stage_id=0,
            prompt_token_ids=prompt_ids,
            completions=[Completion(token_ids=[0] * REPLY_TOKENS)],
            tensors={"talker_input": torch.randn(len(prompt_ids) + REPLY_TOKENS - 1, width)},
        )
        assert self._processor is not None
        made = self._processor.process(StageRequest(request_id=name, prompt_token_ids=prompt_ids), {0: thought})
        assert made is not None
        return made


def measure(talker: Talker, clock: StepClock, batch: int, frames: int, sampled: bool) -> dict[str, float]:
    """Seconds of a decode step by part, with `batch` requests in it."""
    for index in range(batch):
        talker.add(str(index), index, frames, sampled)
    while talker.engine.has_unfinished_requests():
        clock.step()
    del clock.steps[: -(frames - WARM_UP_STEPS)], clock.steps[-1:]
    parts = clock.quick_half()
    clock.steps.clear()
    return parts


@contextmanager
def checkpoints(given: list[Path] | None, size: str) -> Iterator[dict[str, Path]]:
    """By label."""
    if given:
        yield {path.name: path for path in given}
        return
    with tempfile.TemporaryDirectory() as folder:
        yield {name: write_tiny_checkpoint(name, Path(folder) / name, size=size) for name in MODELS}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, nargs="+", help="default: tiny checkpoints of both models")
    parser.add_argument("--size", default="default", help="of the tiny checkpoints: default or large")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests in a step")
    parser.add_argument("--sampled", action="store_true", help="sample instead of taking the likeliest code")
    args = parser.parse_args()
    logging.set_verbosity_error()
    frames = 60 if args.quick else 300
    report = Report("profile_talker", {"size": args.size, "frames": frames, "sampled": str(args.sampled)})
    with checkpoints(args.model, args.size) as models:
        for label, model in models.items():
            progress(f"starting {label}")
            talker = Talker(model)
            clock = StepClock(talker.engine)
            for batch in args.batch:
                progress(f"{label}, batch {batch}")
                add_rows(report, label, batch, measure(talker, clock, batch, frames, args.sampled))
            talker.engine.close()
    report.notes.append("a part's time is without that of the parts inside it; mean of the quicker half of the steps")
    report.finish(args.output)


def add_rows(report: Report, label: str, batch: int, parts: dict[str, float]) -> None:
    total = sum(parts.values())
    for part, seconds in [*parts.items(), ("the step", total)]:
        report.rows.append(
            {"model": label, "batch": batch, "part": part, "ms": 1000 * seconds, "%": 100 * seconds / total}
        )


if __name__ == "__main__":
    main()
