# SPDX-License-Identifier: Apache-2.0
"""What a pipeline's call gets, and what is made of its result; without networks."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.job import DiffusionJob, JobEnd
from vllm_omni.worker.gpu_diffusion_model_runner import DiffusionModelRunner

PIXELS = np.linspace(0, 1, 2 * 3 * 3, dtype=np.float32).reshape(1, 2, 3, 3)


class Empty(DiffusionPipeline):
    components: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]


class Raw(Empty):
    """Its tensors have the range of its network, as in DeepFloyd IF."""

    def __call__(self, prompt: str, generator: torch.Generator, output_type: str = "pil") -> tuple[Any]:
        pixels = PIXELS * float(torch.rand(1, generator=generator))
        return ({"np": pixels, "pt": 2 * torch.from_numpy(pixels) - 1, "latent": torch.ones(1, 4, 8, 8)}[output_type],)


class Plain(Empty):
    """Takes a prompt, and nothing else."""

    def __call__(self, prompt: str) -> tuple[Any]:
        return (PIXELS * len(prompt),)


def run(pipe: DiffusionPipeline, **job: Any) -> JobEnd:
    job = {"request_id": "a", "index": 0, "arguments": {"prompt": "a"}, "seed": 3, **job}
    runner = DiffusionModelRunner(pipe, DiTConfig(), torch.device("cpu"))
    end = runner.start(DiffusionJob(pipeline_class=type(pipe), **job))
    assert end is not None
    assert end.error is None, end.traceback
    return end


def test_pixels_are_in_the_range_of_arrays():
    draw = torch.rand(1, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(run(Raw()).output, torch.from_numpy(PIXELS[0]) * draw)
    assert run(Raw(), latents_only=True).output.shape == (4, 8, 8)


def test_a_pipeline_gets_only_what_it_takes():
    torch.testing.assert_close(run(Plain()).output, torch.from_numpy(PIXELS[0]))


@pytest.mark.parametrize("outputs", [["text"], [PIXELS, PIXELS], PIXELS[0]])
def test_results_that_are_not_one_array_are_refused(outputs: Any):
    class Odd(Empty):
        def __call__(self, prompt: str) -> tuple[Any]:
            return (outputs,)

    runner = DiffusionModelRunner(Odd(), DiTConfig(), torch.device("cpu"))
    job = DiffusionJob(request_id="a", index=0, pipeline_class=Odd, arguments={"prompt": "a"}, seed=3)
    end = runner.start(job)
    assert end is not None and "where one array was expected" in str(end.error)
