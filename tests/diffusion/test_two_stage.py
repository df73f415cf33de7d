# SPDX-License-Identifier: Apache-2.0
"""A language model that rewrites the prompt, and a diffusers pipeline that makes its image."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.diffusion.rewriting import RewrittenPrompt
from vllm_omni import CompletedEvent, ImageProgressEvent, OmniLLM
from vllm_omni.testing.diffusers_oracle import DiffusersOracle

SIZE = {"height": 32, "width": 48, "num_inference_steps": 2, "guidance_scale": 3.0}
WRITER = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
CONFIGURATION = {
    "stage_args": [
        {
            "stage_id": 0,
            "engine_args": {"model_stage": "rewriter", "model": "rewriter", "max_model_len": 256},
            "final_output": True,
            "final_output_type": "text",
            "default_sampling_params": WRITER,
        },
        {
            "stage_id": 1,
            "engine_type": "DiT",
            "engine_args": {"model_stage": "image", "model": "image"},
            "engine_input_source": [0],
            "custom_process_input_func": f"{RewrittenPrompt.__module__}.{RewrittenPrompt.__name__}",
            "final_output": True,
            "final_output_type": "image",
            "default_sampling_params": {**SIZE, "seed": 3, "output_format": "np"},
        },
    ]
}


@pytest.fixture(scope="module")
def llm(
    tiny_qwen3: Path, tiny_diffusion: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OmniLLM]:
    """Both checkpoints lie in one folder, which is the pipeline's model."""
    folder = tmp_path_factory.mktemp("two_stage")
    (folder / "rewriter").symlink_to(tiny_qwen3)
    (folder / "image").symlink_to(tiny_diffusion("z_image"))
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(CONFIGURATION))
    overrides = {"rewriter": {"max_num_seqs": 4, "enforce_eager": True}}
    with OmniLLM(str(folder), str(folder / "pipeline.yaml"), dtype="float32", stage_overrides=overrides) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(tiny_diffusion: Callable[[str], Path]) -> DiffusersOracle:
    return DiffusersOracle(tiny_diffusion("z_image"))


def assert_image(image: Any, oracle: DiffusersOracle, text: str, seed: int) -> None:
    expected = oracle.generate(text, seed=seed, **SIZE).numpy()
    np.testing.assert_allclose(image, expected, rtol=0, atol=1e-4)


def test_the_image_is_that_of_the_rewritten_prompt(llm: OmniLLM, oracle: DiffusersOracle) -> None:
    outputs = llm.generate(["a hen", "a much longer prompt: two ships"], use_tqdm=False)

    texts, images = outputs[::2], outputs[1::2]
    assert texts[0].outputs[0].text != texts[1].outputs[0].text
    for text, image in zip(texts, images, strict=True):
        assert (text.final_output_type, image.final_output_type) == ("text", "image")
        assert_image(image.images[0], oracle, text.outputs[0].text, seed=3)


def test_each_stage_has_parameters_of_its_own(llm: OmniLLM, oracle: DiffusersOracle) -> None:
    params = [{**WRITER, "max_tokens": 5}, {**SIZE, "seed": [8, 1], "num_outputs_per_prompt": 2, "output_format": "np"}]
    text, output = llm.generate("a hen", params, use_tqdm=False)

    assert len(text.outputs[0].token_ids) == 5 and len(output.images) == 2
    for image, seed in zip(output.images, (8, 1), strict=True):
        assert_image(image, oracle, text.outputs[0].text, seed)


def test_a_text_only_request_skips_the_image_stage(llm: OmniLLM) -> None:
    (text,) = llm.generate({"prompt": "a hen", "modalities": ["text"]}, use_tqdm=False)

    assert [metrics.name for metrics in text.stage_metrics] == ["rewriter"]


def test_a_streaming_client_gets_the_text_and_then_the_steps(llm: OmniLLM) -> None:
    *events, last = llm.generate("a hen", stream=True)

    steps = [event for event in events if isinstance(event, ImageProgressEvent)]
    assert [(event.stage_id, event.step, event.num_steps) for event in steps] == [(1, 0, 2), (1, 1, 2)]
    written = "".join(event.text for event in events if event.stage_id == 0)
    assert isinstance(last, CompletedEvent) and written == last.outputs[0].outputs[0].text
