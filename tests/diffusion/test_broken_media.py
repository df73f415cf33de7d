# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose VAE overflows: the request gets an error, and no black image."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.diffusion.watched_engine import WatchedEngine, new_request
from vllm_omni.stage.engines.base import Error


@pytest.fixture(scope="module")
def watched(tiny_diffusion: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedEngine]:
    folder = tmp_path_factory.mktemp("broken") / "z_image"
    shutil.copytree(tiny_diffusion("z_image"), folder)
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(weights) | {"decoder.conv_out.bias": torch.full((3,), float("nan"))}, weights)
    watched = WatchedEngine(folder, max_batch_size=2)
    yield watched
    watched.engine.close()


@pytest.mark.parametrize("output_format", ["pil", "np", "png", "jpeg", "webp"])
def test_an_output_with_nan_is_an_error(watched: WatchedEngine, output_format: str) -> None:
    watched.run_to_the_end(new_request("black", 1, 2, output_format=output_format, num_inference_steps=1))

    end = watched.outbox.items["black"][-1]
    assert isinstance(end, Error) and not end.invalid
    assert "image 0" in end.error and "NaN" in end.error and "half precision" in end.error


def test_the_stage_continues_with_valid_requests(watched: WatchedEngine) -> None:
    requests = [new_request("black", 1), new_request("latents", 1, output_format="latent")]
    watched.run_to_the_end(*requests)

    assert isinstance(watched.outbox.items["black"][-1], Error)
    assert watched.tensors("latents")["latents"].isfinite().all()
