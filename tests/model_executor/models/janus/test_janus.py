# SPDX-License-Identifier: Apache-2.0
"""Janus-Pro's tokens and pixels against HF's on the same weights."""

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import PreemptionCounter, run_engine
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.models.janus.vq_decoder import ImageTokensToVQDecoder
from vllm_omni.model_executor.prompt_processor import PromptProcessor
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.testing.oracles.janus import JanusReference

PROMPTS = (
    "a red cat by the sea",
    "two ships at night in the light of the moon",
    "the house of the man who was not here, and of his cat",
    "the quiet voice of one who was not here, and of the dog that looks at the high white clouds over the long river",
)
CASES = {(prompt, scale): None for prompt in PROMPTS for scale in (None, 2.0)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True, detokenize=False)


def prepare(processor: PromptProcessor, prompt: str, scale: float | None = None, **fields: Any) -> StageInput:
    given = fields if scale is None else {**fields, "guidance_scale": scale}
    return processor({"prompt": prompt, "additional_information": given})


def run(engine: OmniLLMEngine, inputs: dict[str, StageInput], params: SamplingParams = GREEDY) -> dict[str, list[int]]:
    prompts = {name: each.as_prompt() for name, each in inputs.items()}
    outputs = run_engine(engine, prompts, {name: each.apply_to(params) for name, each in inputs.items()})
    return {name: list(output.outputs[0].token_ids) for name, output in outputs.items()}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_prompt_is_that_of_hf(prompt: str, prompt_processor: PromptProcessor, reference: JanusReference) -> None:
    made = prepare(prompt_processor, prompt)
    assert made.prompt_token_ids == reference.prompt_token_ids(prompt)[0].tolist()
    assert made.guidance is not None and len(made.guidance.prompt_token_ids) == len(made.prompt_token_ids)
    assert made.guidance.scale == 5 and made.max_tokens == 16


@pytest.mark.parametrize(("prompt", "scale"), list(CASES))
def test_alone(
    prompt: str,
    scale: float | None,
    language_model_engine: OmniLLMEngine,
    prompt_processor: PromptProcessor,
    reference: JanusReference,
) -> None:
    made = run(language_model_engine, {"0": prepare(prompt_processor, prompt, scale)})
    assert made["0"] == reference.image_tokens(prompt, scale).tolist()


def test_all_at_once(
    language_model_engine: OmniLLMEngine,
    prompt_processor: PromptProcessor,
    reference: JanusReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside requests without guidance, with chunks of prompts and preemptions."""
    preemptions = PreemptionCounter(language_model_engine, monkeypatch)
    guided = {f"{prompt} {scale}": prepare(prompt_processor, prompt, scale) for prompt, scale in CASES}
    plain = {f"plain {prompt}": prepare(prompt_processor, prompt, 1.0) for prompt in PROMPTS}
    alone = {name: run(language_model_engine, {name: each})[name] for name, each in plain.items()}
    assert all(each.guidance is None for each in plain.values())
    expected = {f"{prompt} {scale}": reference.image_tokens(prompt, scale).tolist() for prompt, scale in CASES}
    assert run(language_model_engine, guided | plain) == expected | alone
    assert preemptions.count > 2


def test_seeds(language_model_engine: OmniLLMEngine, prompt_processor: PromptProcessor) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True, detokenize=False)
    inputs = {str(seed): prepare(prompt_processor, PROMPTS[0], seed=seed) for seed in range(3)}
    together = run(language_model_engine, inputs, sampling)
    assert together == {name: run(language_model_engine, {name: each}, sampling)[name] for name, each in inputs.items()}
    assert len(set(map(tuple, together.values()))) == 3


def test_pixels(vq_decoder_engine: OmniLLMEngine, reference: JanusReference) -> None:
    """All images of a step at once."""
    processor = ImageTokensToVQDecoder(reference.model.config)
    tokens = {prompt: reference.image_tokens(prompt) for prompt in PROMPTS}
    request = StageRequest(request_id="0")
    inputs = {
        prompt: processor.process(request, {0: as_output(made.tolist())}).as_prompt() for prompt, made in tokens.items()
    }
    outputs: Any = run_engine(vq_decoder_engine, inputs, SamplingParams(max_tokens=1, detokenize=False))
    for prompt, made in tokens.items():
        image = outputs[prompt].multimodal_output["image"]
        torch.testing.assert_close(image, reference.paint(made)[None], atol=1e-4, rtol=0)


def test_the_reference_rounds_these_pixels_to_bytes(reference: JanusReference) -> None:
    made = reference.image_tokens(PROMPTS[0])
    with torch.no_grad():
        pixels = reference.model.decode_image_tokens(made[None])
    (image,) = reference.processor.postprocess(list(pixels), return_tensors="pt")["pixel_values"]
    expected = (reference.paint(made) * 255).to(torch.uint8).permute(2, 0, 1)
    assert image.shape == expected.shape and (image.int() - expected.int()).abs().max() <= 1


def test_too_few_tokens_fail(reference: JanusReference) -> None:
    with pytest.raises(ValueError, match="made 3 of 16 image tokens; raise its max_tokens"):
        ImageTokensToVQDecoder(reference.model.config).process(StageRequest(request_id="0"), {0: as_output([1, 2, 3])})


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "prompt"),
        ("a <end_of_image>", {}, "prompt has <end_of_image>, a special token"),
        ("a", {"guidance_scale": -1}, "guidance_scale must be a number of at least 0, not -1"),
        ("a", {"guidance_scale": True}, "guidance_scale must be a number"),
        ("a", {"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ("a", {"height": 64}, "height 64: this model makes images of 16 x 16 pixels only"),
        ("a", {"guidance": 2}, "reads no 'guidance'.*did you mean 'guidance_scale'"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    prompt: str, fields: dict[str, Any], message: str, prompt_processor: PromptProcessor
) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_processor({"prompt": prompt, "additional_information": fields})


def as_output(token_ids: list[int]) -> StageOutput:
    return StageOutput(request_id="0", stage_id=0, completions=[Completion(token_ids=token_ids)])
