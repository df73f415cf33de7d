# SPDX-License-Identifier: Apache-2.0
"""What every text-to-speech model is tested for: a stage that makes frames, and the codec of one that makes codes.

A model's test class inherits `SpeechTests`, or `CodeTests` for codes, with the fixture `model`, and `CodecTests`, with
the fixture `codec`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import TIGHT, PreemptionCounter, run_engine, start_engine
from tests.model_executor.models.windows import run_stage
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.stage_config import OmniStageConfig, WindowConfig
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageRequest
from vllm_omni.model_executor.feedback import FedBackRows, FeedbackStrategy
from vllm_omni.model_executor.prompt_processor import PromptProcessor, load_prompt_processor
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor, load_stage_input_processor
from vllm_omni.outputs import StageOutput, merge_stage_outputs
from vllm_omni.stage.engines.llm_request import GenerationRequest

SAMPLED = {"temperature": 0.9, "top_k": 50}


class Case(Protocol):
    """A prompt, as callers give it, and what the reference makes of it."""

    @property
    def prompt(self) -> dict[str, Any]: ...

    @property
    def num_frames(self) -> int: ...

    def check(self, output: Any) -> None:
        """The engine's output for the prompt."""


@dataclass(frozen=True)
class SpeechCase:
    """A prompt, and what the reference makes of it, greedily.

    Attributes:
        prompt: As callers give it.
        codes: int64 `[frames, codebooks]`, all that the first stage emits.
        audio: float32, every `audio_step`th sample.
        ref_codes: int64 `[frames, codebooks]`, those of a reference, which the first stage emits before.
    """

    prompt: dict[str, Any]
    codes: torch.Tensor
    audio: torch.Tensor
    audio_step: int = 1
    ref_codes: torch.Tensor | None = None

    @property
    def num_frames(self) -> int:
        return len(self.codes)

    def check(self, output: Any) -> None:
        assert torch.equal(codes_of(output), self.codes)
        if self.ref_codes is not None:
            assert torch.equal(output.multimodal_output["ref_codes"], self.ref_codes)


@dataclass(frozen=True)
class SpeechModel:
    """
    Attributes:
        engine: Of the first stage, with so little memory that all cases at once preempt each other.
        greedy: Parameters of the first stage, without those of the prompt processor.
        num_fixed: Frames at the beginning of which at most the first code is sampled.
    """

    engine: OmniLLMEngine
    prompt_processor: PromptProcessor
    cases: Mapping[str, Case]
    greedy: dict[str, Any]
    num_fixed: int = 0

    def run(
        self, prompts: dict[str, Any], own: dict[str, dict[str, Any]] | None = None, **params: Any
    ) -> dict[str, Any]:
        """The engine's last output for each prompt, with `params`, or with its `own`."""
        inputs = {name: self.prompt_processor(prompt) for name, prompt in prompts.items()}
        by_name = {name: (own or {}).get(name, params) for name in prompts}
        return run_engine(
            self.engine,
            {name: given.as_prompt() for name, given in inputs.items()},
            {name: given.apply_to(self.params(**by_name[name])) for name, given in inputs.items()},
        )

    def params(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**{"detokenize": False, **self.greedy, **changes})

    @property
    def prompts(self) -> dict[str, Any]:
        return {name: case.prompt for name, case in self.cases.items()}

    def check(self, outputs: dict[str, Any]) -> None:
        """Those outputs that are of a case."""
        for name in outputs.keys() & self.cases.keys():
            self.cases[name].check(outputs[name])

    @property
    def runner(self) -> Any:
        return self.engine.model_executor.driver_worker.model_runner  # type: ignore[union-attr]


@dataclass(frozen=True)
class SpeechCodec:
    """
    Attributes:
        engine: Of the second stage.
        cases: What it decodes.
        tolerance: Of samples.
        num_held: Frames that wait for those after them.
    """

    engine: OmniLLMEngine
    input_processor: StageInputProcessor
    cases: dict[str, SpeechCase]
    tolerance: float = 1e-4
    num_held: int = 0


def stage_of(model: str, stage_id: int) -> OmniStageConfig:
    """As the model's shipped configuration has it."""
    return load_pipeline_config(stage_configs_dir() / f"{model}.yaml").stages[stage_id]


def load_prompts(model: str, checkpoint: Path) -> PromptProcessor:
    processor = load_prompt_processor(stage_of(model, 0), str(checkpoint))
    assert processor is not None
    return processor


def check_refused(processor: PromptProcessor, information: dict[str, Any], field: str) -> None:
    """A wrong field is named. What the messages say else is tested with the prompt processors."""
    with pytest.raises((ValueError, TypeError), match=re.escape(field)):
        processor({"prompt": "hello", "additional_information": information})


@contextmanager
def start_speaker(checkpoint: Path, **engine_args: Any) -> Iterator[OmniLLMEngine]:
    """The first stage, with so little memory that requests preempt each other."""
    defaults = {
        "engine_output_type": "codes",
        "enable_prompt_embeds": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        **TIGHT,
    }
    engine = start_engine(checkpoint, **defaults | engine_args)
    yield engine
    engine.close()


@contextmanager
def start_codec(model: str, folder: Path, cases: dict[str, SpeechCase], num_held: int = 0) -> Iterator[SpeechCodec]:
    """The second stage."""
    stage = stage_of(model, 1)
    arguments = {
        name: stage.engine_args[name] for name in ("model_arch", "hf_config_name") if name in stage.engine_args
    }
    engine = start_engine(folder, engine_type="generation", engine_output_type="audio", max_model_len=512, **arguments)
    processor = load_stage_input_processor(stage, str(folder))
    assert processor is not None
    yield SpeechCodec(engine, processor, cases, num_held=num_held)
    engine.close()


def codes_of(output: Any) -> torch.Tensor:
    """int64 `[frames, codebooks]`."""
    codes: torch.Tensor = output.multimodal_output["codes"]
    return codes


class SpeechTests:
    def test_requests_alone(self, model: SpeechModel) -> None:
        for name, prompt in model.prompts.items():
            model.check(model.run({name: prompt}))
        lengths = {case.num_frames for case in model.cases.values()}
        assert len(lengths) > 2, "speech of different lengths, of which some has ended by itself"

    def test_all_at_once_with_chunks_and_preemptions(self, model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
        preemptions = PreemptionCounter(model.engine, monkeypatch)
        model.check(model.run(model.prompts))
        assert preemptions.count > 0

    def test_an_abort_leaves_the_others_and_nothing_else(self, model: SpeechModel) -> None:
        for name, prompt in model.prompts.items():
            given = model.prompt_processor(prompt)
            for request_id in (name, f"{name}, aborted"):
                model.engine.add_request(request_id, given.as_prompt(), given.apply_to(model.params()))
        outputs: dict[str, Any] = {}
        aborted = [f"{name}, aborted" for name in model.prompts]
        while model.engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in model.engine.step()}  # type: ignore[misc]
            model.engine.abort_request(aborted[-1:])
            aborted = aborted[:-1]
        model.check(outputs)
        model.engine.engine_core.get_output()  # what has ended is dropped with the next step
        runner = model.runner
        assert (len(runner.slots), runner.omni_info, runner.open_inputs, runner.requests) == (0, {}, set(), {})
        assert runner.slots.lowest_free == 0 and runner.strategy._prompts == {}


class CodeTests(SpeechTests):
    def test_a_seed_fixes_every_code_whatever_else_runs(
        self, model: SpeechModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = max(model.cases, key=lambda name: model.cases[name].num_frames)
        prompt = model.cases[name].prompt
        alone = codes_of(model.run({"alone": prompt}, seed=7, **SAMPLED)["alone"])
        preemptions = PreemptionCounter(model.engine, monkeypatch)
        outputs = model.run(
            {**model.prompts, "again": prompt, "other": prompt},
            own={"again": {"seed": 7, **SAMPLED}, "other": {"seed": 8, **SAMPLED}},
        )
        assert preemptions.count > 0
        assert torch.equal(codes_of(outputs["again"]), alone)
        other = codes_of(outputs["other"])
        assert other.shape != alone.shape or not torch.equal(other, alone)
        model.check(outputs)  # greedy requests are not touched by sampled ones

    def test_residual_codes_are_sampled_too(self, model: SpeechModel) -> None:
        prompt = next(iter(model.prompts.values()))
        first = model.num_fixed
        outputs = model.run({str(i): prompt for i in range(24)}, max_tokens=first + 2, **SAMPLED)
        codes = [codes_of(output) for output in outputs.values()]
        frames = {tuple(rows[first].tolist()) for rows in codes if len(rows) > first}
        assert len(frames) > len({frame[0] for frame in frames}), "equal first codes have different residual codes"


class CodecTests:
    @pytest.mark.parametrize("window", [1, -1])
    def test_the_waveform_is_that_of_one_decode_for_any_windows(self, window: int, codec: SpeechCodec) -> None:
        pieces = {name: list(one_by_one(name, case)) for name, case in codec.cases.items()}
        params = SamplingParams(max_tokens=1, detokenize=False)
        requests = {name: StageRequest(request_id=name, sampling_params=params) for name in codec.cases}
        sizes = WindowConfig(window_size=window, first_window_size=window, unit="codes")
        waves = run_stage(codec.engine, GenerationRequest, codec.input_processor, requests, pieces, sizes, seed=window)
        for name, case in codec.cases.items():
            wave = merge_stage_outputs(waves[name]).tensors["audio"]
            torch.testing.assert_close(wave[:: case.audio_step], case.audio, rtol=0, atol=codec.tolerance)
            if window > 0:
                num_windows = (len(case.codes) - 1 - codec.num_held) // window
                assert len(waves[name]) >= num_windows, "sound comes as soon as there is some"


@torch.no_grad()
def speak_frames(
    strategy: FeedbackStrategy,
    hidden_size: int,
    device: torch.device,
    num_frames: int = 3,
    tokens: Sequence[int] = (4, 0),
) -> list[torch.Tensor]:
    """What slots 1 and 0 are fed back after these tokens, and what they emit, frame by frame; then 0 ends."""
    slots = torch.tensor([1, 0], device=device)
    made = []
    for frame in range(num_frames):
        strategy.save_hidden_states(slots, torch.randn(2, hidden_size).to(device))
        rows = FedBackRows(torch.tensor(tokens, device=device), slots, torch.full((2,), frame, device=device))
        for fed_back in (strategy.feed_back(rows), strategy.replay(rows)):
            made += [fed_back.embeds, *fed_back.outputs.values()]
            made += [] if fed_back.is_last is None else [fed_back.is_last]
    strategy.end(0)
    return made


@torch.no_grad()
def decode_in_windows(
    codec: nn.Module, codes: torch.Tensor, ends: Sequence[int], num_silent: Sequence[int] = (0, 0)
) -> list[torch.Tensor]:
    """The waves of the windows of two requests, whose windows share a step.

    Args:
        codes: int64 `[2, frames, codebooks]`, on the CPU.
        ends: Where the windows end.
        num_silent: Of the first window of each request.
    """
    states: list[dict[str, Any]] = [{}, {}]
    waves = []
    for start, stop in pairwise((0, *ends)):
        infos = [
            {
                "codes": codes[i, start:stop],
                "num_silent": 0 if start else num_silent[i],
                "state": states[i],
                "is_last": stop == ends[-1],
            }
            for i in range(2)
        ]
        made = codec(torch.empty(0), torch.empty(0), runtime_additional_information=infos)
        waves += [output["audio"] for output in made]
    return waves


def one_by_one(name: str, case: SpeechCase) -> Iterator[StageOutput]:
    """What the first stage emits, frame by frame."""
    if case.ref_codes is not None:
        yield StageOutput(request_id=name, stage_id=0, tensors={"ref_codes": case.ref_codes}, is_last=False)
    frames = case.codes.split(1)  # of no codes: one without any
    for index, frame in enumerate(frames):
        is_last = index == len(frames) - 1
        yield StageOutput(request_id=name, stage_id=0, tensors={"codes": frame}, is_last=is_last)
