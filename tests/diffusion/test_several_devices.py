# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose denoiser runs in two processes: images, previews, and a process that is killed."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.entrypoints.fake_pipelines import descendants, wait_until_ended
from vllm_omni import CompletedEvent, ImageProgressEvent, OmniLLM
from vllm_omni.testing.diffusers_oracle import DiffusersOracle

SIZE = {"height": 64, "width": 64, "num_inference_steps": 3, "guidance_scale": 3.0, "negative_prompt": "grey"}
PARAMS = {**SIZE, "seed": 7, "output_format": "np"}


@pytest.fixture
def llm(tiny_diffusion: Callable[[str], Path]) -> Iterator[OmniLLM]:
    with OmniLLM(str(tiny_diffusion("z_image")), data_parallel_size=2) as llm:
        yield llm


def denoisers() -> set[psutil.Process]:
    """The processes of this pipeline that compute a denoiser with the stage's own."""
    return descendants("::denoiser")


def check_image(llm: OmniLLM, expected: np.ndarray) -> None:
    (output,) = llm.generate("a hen", PARAMS, use_tqdm=False)
    np.testing.assert_allclose(output.images[0], expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_the_stage_of_a_killed_process_restarts_and_the_request_goes_on(
    llm: OmniLLM, tiny_diffusion: Callable[[str], Path]
) -> None:
    expected = DiffusersOracle(tiny_diffusion("z_image")).generate("a hen", seed=7, **SIZE).numpy()
    check_image(llm, expected)
    (denoiser,) = denoisers()
    params = {**PARAMS, "num_inference_steps": 60, "preview_every": 20}
    events = llm.generate("a hen", params, stream=True)
    first = next(events)
    os.kill(denoiser.pid, signal.SIGKILL)
    *others, last = events
    steps = [event.step for event in (first, *others) if isinstance(event, ImageProgressEvent)]
    assert steps == list(range(60))
    assert isinstance(last, CompletedEvent)
    (undisturbed,) = llm.generate("a hen", params, use_tqdm=False)
    np.testing.assert_allclose(last.outputs[0].images[0], undisturbed.images[0], rtol=0, atol=1e-4)
    assert "a worker of its engine ended" in (llm.health()[0].last_death or "")

    check_image(llm, expected)
    (restarted,) = denoisers()
    assert restarted != denoiser
    stage = restarted.parent()
    stage.kill()
    wait_until_ended([restarted])  # It ends with the stage's process, however that ended.
    check_image(llm, expected)
    left = denoisers()
    llm.close()
    assert len(left) == 1
    wait_until_ended(left)
