# SPDX-License-Identifier: Apache-2.0
"""A diffusers pipeline as two stages: one encodes prompts, the other denoises; the image is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vllm_omni import OmniLLM
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.entrypoints.request_builder import RequestBuilder
from vllm_omni.errors import InvalidRequestError, StageConfigError
from vllm_omni.testing.diffusers_oracle import DiffusersOracle

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2}


def two_stages(**denoiser: Any) -> dict[str, Any]:
    encoder = {"model_stage": "encoder", "part": "encoder"}
    return {
        "stage_args": [
            {"stage_id": 0, "engine_type": "DiT", "engine_args": encoder},
            {
                "stage_id": 1,
                "engine_type": "DiT",
                "engine_args": {"model_stage": "denoiser", "part": "denoiser"},
                "engine_input_source": [0],
                "final_output": True,
                "final_output_type": "image",
                **denoiser,
            },
        ]
    }


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("z_image", {"guidance_scale": 4.0, "negative_prompt": "grey"}),
        ("qwen_image", {"true_cfg_scale": 3.0, "negative_prompt": "grey and dull"}),
        ("stable_diffusion_3", {}),
    ],
)
def test_the_image_equals_that_of_the_whole_pipeline(
    tiny_diffusion: Callable[[str], Path], tmp_path: Path, name: str, settings: dict[str, Any]
):
    model, settings = tiny_diffusion(name), SETTINGS | settings
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump(two_stages()))
    prompts = ["a cat", "a very large dog in the rain"]
    with OmniLLM(str(model), stage_configs_path=str(path)) as llm:
        outputs = llm.generate(prompts, [None, settings | {"seed": 5, "output_format": "np"}], use_tqdm=False)
    oracle = DiffusersOracle(model)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle.generate(prompt, seed=5, **settings)
        torch.testing.assert_close(torch.from_numpy(output.images[0]), expected, atol=1e-4, rtol=0)
        assert [stage.name for stage in output.stage_metrics] == ["encoder", "denoiser"]


def test_settings_are_given_to_the_stage_that_denoises(tiny_diffusion: Callable[[str], Path]):
    builder = RequestBuilder(parse_pipeline_config(two_stages(), "test"), str(tiny_diffusion("z_image")))
    with pytest.raises(InvalidRequestError, match="'encoder' uses the sampling parameters of stage 'denoiser'"):
        builder.build("a cat", [{"negative_prompt": "grey"}, None], lambda event: None)


def test_both_stages_have_the_same_defaults(tiny_diffusion: Callable[[str], Path]):
    config = parse_pipeline_config(two_stages(default_sampling_params={"guidance_scale": 1.0}), "test")
    with pytest.raises(StageConfigError, match="default_sampling_params must be those of stage 1"):
        RequestBuilder(config, str(tiny_diffusion("z_image")))


def test_an_encoder_needs_a_reader(tiny_diffusion: Callable[[str], Path]):
    raw = two_stages()
    raw["stage_args"] = [raw["stage_args"][0] | {"final_output": True, "final_output_type": "image"}]
    with pytest.raises(StageConfigError, match="no diffusion stage reads it"):
        RequestBuilder(parse_pipeline_config(raw, "test"), str(tiny_diffusion("z_image")))
