# SPDX-License-Identifier: Apache-2.0
"""A stage with a cache makes the images of diffusers with the same cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers.hooks
import pytest
import torch
from diffusers import DiffusionPipeline

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.job import DiffusionJob, JobEnd
from vllm_omni.diffusion.pipeline_settings import cache_backends
from vllm_omni.executor.diffusers_executor import DiffusersPipelineExecutor

pytestmark = pytest.mark.slow

ARGUMENTS: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 6, "max_sequence_length": 64}
# Settings that do something in six steps, except for those of a cache that changes nothing by design.
SETTINGS: dict[str, dict[str, Any]] = {
    "first_block_cache": {"threshold": 0.9},
    "taylorseer_cache": {"cache_interval": 2, "disable_cache_before_step": 2, "taylor_factors_dtype": "float32"},
    "mag_cache": {"mag_ratios": [1.0] * 6, "num_inference_steps": 6},
    "pyramid_attention_broadcast": {"spatial_attention_block_skip_range": 2},
    "faster_cache": {"tensor_format": "BCHW", "is_guidance_distilled": True},
    "text_kv_cache": {},
}


@pytest.fixture(scope="module")
def flux(tiny_diffusion: Callable[[str], Path]) -> Path:
    return tiny_diffusion("flux")


@pytest.fixture(scope="module")
def uncached(flux: Path) -> torch.Tensor:
    return generate(bare(flux), "a cat")


def bare(model: Path, config: Any = None) -> DiffusionPipeline:
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    if config is not None:
        if hasattr(config, "current_timestep_callback"):
            config.current_timestep_callback = lambda: pipe.current_timestep
        pipe.transformer.enable_cache(config)
    return pipe


def generate(pipe: DiffusionPipeline, prompt: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return pipe(prompt, generator=generator, output_type="pt", **ARGUMENTS).images[0].movedim(0, -1)


def job(executor: DiffusersPipelineExecutor, prompt: str) -> DiffusionJob:
    pipeline_class = type(executor.runner._pipe)
    arguments = {"prompt": prompt, **ARGUMENTS}
    return DiffusionJob(request_id=prompt, index=0, pipeline_class=pipeline_class, arguments=arguments, seed=1)


def run(executor: DiffusersPipelineExecutor) -> dict[str, JobEnd]:
    ends: list[JobEnd] = []
    while executor.has_work:
        ends += executor.step()[0]
    return {end.job.request_id: end for end in ends}


def in_diffusers(backend: str) -> Any:
    """The same settings, written for diffusers."""
    name = next(name for name, cls in vars(diffusers.hooks).items() if cls is cache_backends()[backend])
    settings = dict(SETTINGS[backend])
    if "taylor_factors_dtype" in settings:
        settings["taylor_factors_dtype"] = torch.float32
    return getattr(diffusers.hooks, name)(**settings)


@pytest.mark.parametrize("backend", SETTINGS)
def test_concurrent_images_and_an_image_after_an_abort(flux: Path, uncached: torch.Tensor, backend: str) -> None:
    config = DiTConfig(cache_backend=backend, cache_config=SETTINGS[backend])
    executor = DiffusersPipelineExecutor(str(flux), config)
    executor.start()
    executor.add(job(executor, "a dog"))
    for _ in range(6):  # its prompt is encoded, some steps are done
        executor.step()
    assert executor.has_work
    executor.abort("a dog")
    executor.add(job(executor, "a cat"))
    executor.add(job(executor, "a blue house"))
    ends = run(executor)
    expected = bare(flux, in_diffusers(backend))
    for prompt in ("a cat", "a blue house"):
        assert (ends[prompt].output - generate(expected, prompt)).abs().max() < 1e-4
    has_effect = (ends["a cat"].output - uncached).abs().max() > 1e-3
    assert has_effect == (backend != "text_kv_cache")


def test_all_of_diffusers_caches_have_names() -> None:
    assert set(SETTINGS) | {"sea_cache"} <= set(cache_backends())
