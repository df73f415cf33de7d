# SPDX-License-Identifier: Apache-2.0
"""What every text-to-speech model of two stages is tested for: one that makes frames of codes, and its codec.

A model's test class inherits `SpeechTests`, with the fixture `model`, and `CodecTests`, with the fixture `codec` too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import PreemptionCounter, run_engine
from tests.model_executor.models.windows import run_stage
from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageRequest
from vllm_omni.model_executor.prompt_processor import PromptProcessor
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput, merge_stage_outputs
from vllm_omni.stage.engines.llm_request import GenerationRequest

SAMPLED = {"temperature": 0.9, "top_k": 50}


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
    cases: dict[str, SpeechCase]
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
        """The codes of those outputs that are of a case."""
        for name, output in outputs.items():
            if name in self.cases:
                case = self.cases[name]
                assert torch.equal(codes_of(output), case.codes), name
                if case.ref_codes is not None:
                    assert torch.equal(output.multimodal_output["ref_codes"], case.ref_codes), name

    @property
    def runner(self) -> Any:
        return self.engine.model_executor.driver_worker.model_runner  # type: ignore[union-attr]


@dataclass(frozen=True)
class SpeechCodec:
    """
    Attributes:
        engine: Of the second stage.
        tolerance: Of samples.
        num_held: Frames that wait for those after them.
    """

    engine: OmniLLMEngine
    input_processor: StageInputProcessor
    tolerance: float = 1e-4
    num_held: int = 0


def codes_of(output: Any) -> torch.Tensor:
    """int64 `[frames, codebooks]`."""
    codes: torch.Tensor = output.multimodal_output["codes"]
    return codes


class SpeechTests:
    def test_requests_alone(self, model: SpeechModel) -> None:
        for name, prompt in model.prompts.items():
            model.check(model.run({name: prompt}))
        lengths = {len(case.codes) for case in model.cases.values()}
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

    def test_a_seed_fixes_every_code_whatever_else_runs(
        self, model: SpeechModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = max(model.cases, key=lambda name: len(model.cases[name].codes))
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
    @pytest.mark.parametrize("window", [7, -1, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 25))])
    def test_the_waveform_is_that_of_one_decode_for_any_windows(
        self, window: int, model: SpeechModel, codec: SpeechCodec
    ) -> None:
        pieces = {name: list(one_by_one(name, case)) for name, case in model.cases.items()}
        params = SamplingParams(max_tokens=1, detokenize=False)
        requests = {name: StageRequest(request_id=name, sampling_params=params) for name in model.cases}
        sizes = WindowConfig(window_size=window, first_window_size=window, unit="codes")
        waves = run_stage(codec.engine, GenerationRequest, codec.input_processor, requests, pieces, sizes, seed=window)
        for name, case in model.cases.items():
            wave = merge_stage_outputs(waves[name]).tensors["audio"]
            torch.testing.assert_close(wave[:: case.audio_step], case.audio, rtol=0, atol=codec.tolerance)
            if window > 0:
                num_windows = (len(case.codes) - 1 - codec.num_held) // window
                assert len(waves[name]) >= num_windows, "sound comes as soon as there is some"


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
    for index, frame in enumerate(case.codes.split(1)):
        is_last = index == len(case.codes) - 1
        yield StageOutput(request_id=name, stage_id=0, tensors={"codes": frame}, is_last=is_last)
