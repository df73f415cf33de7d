# SPDX-License-Identifier: Apache-2.0
"""GLM-Image's tokens against HF's on the same weights: whatever else runs, they are equal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import PreemptionCounter, run_engine
from vllm_omni.diffusion.input_images import read_images
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.models.glm_image.stage_input_processors import PriorToDiffusion
from vllm_omni.model_executor.prompt_processor import PromptProcessor
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.sampling_params import DiffusionRequest
from vllm_omni.testing.oracles.glm_image import GlmImageReference

from .cases import CASES, ImageCase

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "top_p": 0.9}
Tokens = tuple[torch.Tensor, torch.Tensor | None]


@pytest.fixture(scope="module")
def expected(reference: GlmImageReference) -> dict[str, Tokens]:
    return {name: case.prior_tokens(reference) for name, case in CASES.items()}


@dataclass(frozen=True)
class Stage:
    """The first stage, and the input that the second one makes of its output."""

    engine: OmniLLMEngine
    prompt_processor: PromptProcessor

    def given(self, case: ImageCase) -> StageInput:
        return self.prompt_processor(case.omni_prompt, case.settings)  # type: ignore[arg-type]

    def params(self, case: ImageCase, own: Mapping[str, Any]) -> SamplingParams:
        return self.given(case).apply_to(SamplingParams(**{"detokenize": False, "max_tokens": 512, **own}))

    def run(self, cases: Mapping[str, ImageCase], own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The engine's outputs. `own`: parameters by name; greedy for all others."""
        own = own or {}
        prompts = {name: self.given(case).as_prompt() for name, case in cases.items()}
        params = {name: self.params(case, own.get(name, GREEDY)) for name, case in cases.items()}
        return run_engine(self.engine, prompts, params)

    def arguments(self, case: ImageCase, output: Any) -> dict[str, Any]:
        """Of diffusers' pipeline."""
        information = self.given(case).additional_information
        options = {name: value for name, value in information.items() if not isinstance(value, torch.Tensor)}
        prior = StageOutput(
            request_id="0",
            stage_id=0,
            completions=[Completion(token_ids=list(output.outputs[0].token_ids))],
            tensors=output.multimodal_output,
        )
        images = read_images({"image": case.images}, max_pixels=1 << 20)
        diffusion = DiffusionRequest(params=case.settings, seeds=[0], images=images)
        request = StageRequest(request_id="0", prompt=case.prompt, options=options, diffusion=diffusion)
        made = PriorToDiffusion(None).process(request, {0: prior})  # type: ignore[arg-type]
        assert made is not None and made.prompt == case.prompt
        return made.additional_information


@pytest.fixture(scope="module")
def stage(prior_engine: OmniLLMEngine, prompt_processor: PromptProcessor) -> Stage:
    return Stage(prior_engine, prompt_processor)


def check(stage: Stage, outputs: dict[str, Any], expected: dict[str, Tokens]) -> None:
    """The arguments of the pipeline for those outputs that are of a case."""
    for name in outputs.keys() & CASES.keys():
        case, (tokens, given) = CASES[name], expected[name]
        arguments = stage.arguments(case, outputs[name])
        assert torch.equal(arguments["prior_token_ids"], tokens[None]), name
        assert ("prior_token_image_ids" in arguments) == bool(case.images)
        if given is not None:
            assert torch.equal(arguments["prior_token_image_ids"][0], given), name
            grids = [(1, image.height // 16, image.width // 16) for image in case.images]
            assert arguments["source_image_grid_thw"][0].tolist() == [list(grid) for grid in grids]
            assert [image.tobytes() for image in arguments["image"]] == [image.tobytes() for image in case.images]


def test_requests_alone(stage: Stage, expected: dict[str, Tokens]) -> None:
    for name, case in CASES.items():
        check(stage, stage.run({name: case}), expected)
    assert len({tuple(tokens.tolist()) for tokens, _ in expected.values()}) == len(CASES)


def test_all_at_once_with_chunks_and_preemptions(
    stage: Stage, expected: dict[str, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    preemptions = PreemptionCounter(stage.engine, monkeypatch)
    check(stage, stage.run(CASES), expected)
    assert preemptions.count > 0


def test_an_abort_leaves_the_others_and_nothing_else(stage: Stage, expected: dict[str, Tokens]) -> None:
    for name, case in CASES.items():
        for request_id in (name, f"{name}, aborted"):
            stage.engine.add_request(request_id, stage.given(case).as_prompt(), stage.params(case, GREEDY))
    outputs: dict[str, Any] = {}
    aborted = [f"{name}, aborted" for name in CASES]
    while stage.engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in stage.engine.step()}  # type: ignore[misc]
        stage.engine.abort_request(aborted[-1:])
        aborted = aborted[:-1]
    check(stage, outputs, expected)
    stage.engine.engine_core.get_output()  # what has ended is dropped with the next step
    runner: Any = stage.engine.model_executor.driver_worker.model_runner  # type: ignore[union-attr]
    assert (len(runner.slots), runner.omni_info, runner.requests) == (0, {}, {})
    assert (runner.strategy._prompts, runner.strategy._image_ids) == ({}, {})


def test_a_seed_fixes_every_token_whatever_else_runs(
    stage: Stage, expected: dict[str, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["glyphs"]
    alone = stage.run({"alone": case}, {"alone": {"seed": 7, **SAMPLED}})["alone"].outputs[0].token_ids
    preemptions = PreemptionCounter(stage.engine, monkeypatch)
    own = {"again": {"seed": 7, **SAMPLED}, "other": {"seed": 8, **SAMPLED}}
    outputs = stage.run({**CASES, "again": case, "other": case}, own)
    assert preemptions.count > 0
    assert outputs["again"].outputs[0].token_ids == alone != outputs["other"].outputs[0].token_ids
    check(stage, outputs, expected)


def test_only_image_tokens_are_sampled(stage: Stage, reference: GlmImageReference) -> None:
    """Whatever a request's parameters are: the DiT has no other embeddings."""
    codebook = reference.pipe.vision_language_encoder.config.vq_config.num_embeddings
    own = {
        "hot": {"temperature": 2.0, "seed": 1},
        "penalties": {"temperature": 2.0, "seed": 1, "repetition_penalty": 0.5, "presence_penalty": -1.0},
        "bias": {"temperature": 2.0, "seed": 1, "logit_bias": {codebook: 100.0, 300: 100.0}},
    }
    outputs = stage.run(dict.fromkeys(own, CASES["text"]), own)
    for output in outputs.values():
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) == 16 * 16 + 2 * 2 and max(token_ids) < codebook


def test_fewer_tokens_than_the_image_has_are_an_error(stage: Stage) -> None:
    case = CASES["one image"]
    output = stage.run({"short": case}, {"short": {**GREEDY, "max_tokens": 3}})["short"]
    with pytest.raises(ValueError, match="made 3 of 4 image tokens; raise its max_tokens"):
        stage.arguments(case, output)


def test_images_of_any_size_fit_the_dit(stage: Stage) -> None:
    """The pipeline fails where an image has other tokens than positions; those that fit are not changed."""
    images = [CASES["one image"].images[0].resize(size) for size in ((111, 50), (96, 64), (95, 70))]
    case = ImageCase("a cat", images=[images[0].convert("RGBA"), *images[1:]])
    arguments = stage.arguments(case, stage.run({"any": case})["any"])
    (grids,) = arguments["source_image_grid_thw"]
    made = arguments["image"]
    assert [(1, image.height // 16, image.width // 16) for image in made] == [tuple(grid) for grid in grids.tolist()]
    assert made[1].tobytes() == images[1].tobytes() and {image.mode for image in made} == {"RGB"}
