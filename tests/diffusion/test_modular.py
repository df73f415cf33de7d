# SPDX-License-Identifier: Apache-2.0
"""Modular pipelines, opened by their folder: what they make is what bare diffusers makes, and what is wrong is refused
before anything runs."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.diffusion.indexes import make_processor
from tests.diffusion.tiny_modular import CALLS, BareModular, write_modular
from tests.diffusion.watched_engine import WatchedEngine
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.input_processor import DiffusionInputProcessor
from vllm_omni.diffusion.pipeline_info import PipelineInfo
from vllm_omni.inputs import StageRequest
from vllm_omni.sampling_params import DiffusionSamplingParams
from vllm_omni.stage.engines.base import NewRequest

PROMPTS = ("a red cat", "two ships at night, " * 2, "it", "a house on a hill", "a dog", "rain in a city")
FAST = ("wan", "z_image", "z_image, image")


@pytest.fixture(scope="session")
def tiny_modular(
    tmp_path_factory: pytest.TempPathFactory, tiny_diffusion: Callable[[str], Path]
) -> Callable[[str], Path]:
    """The folder of a modular checkpoint, by the name of its tiny pipeline; each is written once."""

    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp("modular") / name
        write_modular(name, folder, tiny_diffusion)
        return folder

    return functools.cache(write)


def new_request(
    processor: DiffusionInputProcessor, number: int, prompt: str, media: dict[str, Any], settings: dict[str, Any]
) -> NewRequest:
    """A request as another process gets it."""
    fields = DiffusionSamplingParams.__struct_fields__
    extra = {key: value for key, value in settings.items() if key not in fields}
    own = {"seed": number, "output_format": "np"} | {key: settings[key] for key in settings if key in fields}
    diffusion = processor.process({"prompt": prompt, "multi_modal_data": media}, {**own, "extra_args": extra})
    request = StageRequest(request_id=str(number), prompt=prompt, diffusion=diffusion)
    return NewRequest(MsgpackDecoder(StageRequest).decode(MsgpackEncoder().encode(request)), streams_output=True)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CALLS])
def test_alone_and_among_others_a_request_equals_diffusers(name: str, tiny_modular: Callable[[str], Path]) -> None:
    source, media, settings = CALLS[name]
    folder = tiny_modular(source)
    bare = BareModular(folder)
    info = PipelineInfo.load(str(folder), DiTConfig())
    output = f"{info.output_type}s"
    expected = [bare(p, seed, output, **media, **settings)[0] for seed, p in enumerate(PROMPTS)]
    assert expected[0].std() > 0.01 and np.abs(expected[0] - expected[1]).max() > 1e-3

    processor = make_processor(folder, None, makes=info.output_type)
    requests = [new_request(processor, seed, prompt, media, settings) for seed, prompt in enumerate(PROMPTS)]
    watched = WatchedEngine(folder, max_batch_size=6)
    for group in (requests[:1], requests):
        batches = watched.run_to_the_end(*group)
        for request in group:
            (made,) = watched.tensors(request.request_id)[info.output_type].numpy()
            one = expected[int(request.request_id)]
            np.testing.assert_allclose(made, one, rtol=0, atol=1e-4, err_msg=request.request_id)
    assert max(batches) == 6
