# SPDX-License-Identifier: Apache-2.0
"""Many of diffusers' pipeline classes in one process: each request makes what bare diffusers makes, alone and among
others. `docs/diffusion.md` lists these classes: `python -m tests.diffusion.test_many_pipelines` prints its table."""

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from tests.diffusion.tiny_calls import make_image
from tests.diffusion.tiny_pipelines import build
from tests.executor.test_diffusers_executor import Harness
from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.pipeline_info import PipelineInfo

DOCUMENT = Path(__file__).parents[2] / "docs" / "diffusion.md"

SMALL = {"height": 64, "width": 64, "num_inference_steps": 2}
WITH_IMAGE = {"image": make_image(0, 64, 64), "num_inference_steps": 3, "strength": 0.7}
CONTROLLED = {**SMALL, "image": make_image(0, 64, 64)}
CALLS: dict[str, dict[str, Any]] = {
    "StableDiffusionPipeline": SMALL,
    "StableDiffusionImg2ImgPipeline": WITH_IMAGE,
    "StableDiffusionInstructPix2PixPipeline": {"image": make_image(0, 64, 64), "num_inference_steps": 2},
    "StableDiffusionControlNetPipeline": CONTROLLED,
    "StableDiffusionAdapterPipeline": CONTROLLED,
    "StableDiffusionPAGPipeline": SMALL,
    "StableDiffusionPAGImg2ImgPipeline": WITH_IMAGE,
    "StableDiffusionControlNetPAGPipeline": CONTROLLED,
    "LatentConsistencyModelPipeline": SMALL,
    "LatentConsistencyModelImg2ImgPipeline": WITH_IMAGE,
    "StableDiffusionXLPipeline": SMALL,
    "StableDiffusionXLImg2ImgPipeline": WITH_IMAGE,
    "StableDiffusionXLInstructPix2PixPipeline": CONTROLLED,
    "StableDiffusionXLControlNetPipeline": CONTROLLED,
    "StableDiffusionXLAdapterPipeline": CONTROLLED,
    "StableDiffusionXLPAGPipeline": SMALL,
    "StableDiffusionXLPAGImg2ImgPipeline": WITH_IMAGE,
    "AnimateDiffPipeline": {**SMALL, "num_frames": 2},
    "PixArtAlphaPipeline": {**SMALL, "use_resolution_binning": False},
    "PixArtSigmaPipeline": {**SMALL, "use_resolution_binning": False},
    "PixArtSigmaPAGPipeline": {**SMALL, "use_resolution_binning": False},
    "LattePipeline": {**SMALL, "video_length": 2},
    "OmniGenPipeline": SMALL,
    "KandinskyV22CombinedPipeline": {**SMALL, "prior_num_inference_steps": 2},
    "KandinskyV22Img2ImgCombinedPipeline": {**SMALL, **WITH_IMAGE, "prior_num_inference_steps": 2},
    "Kandinsky3Pipeline": SMALL,
    "IFPipeline": {**SMALL, "height": 32, "width": 32},
    "PRXPixelPipeline": {**SMALL, "use_resolution_binning": False},
}
"""Class of diffusers -> arguments of its call."""

ALONE = {
    **dict.fromkeys([name for name in CALLS if "PAG" in name], "unet"),
    "PixArtSigmaPAGPipeline": "transformer",
    "OmniGenPipeline": "transformer",
}
"""Those with a network that mixes requests, or that the pipeline changes: it gets one request at a time."""

PROMPTS = ("a red cat", "two ships at night, " * 2, "it", "a house on a hill", "a dog", "rain in a city")


class Bare:
    """Diffusers alone."""

    def __init__(self, name: str, path: Path) -> None:
        self.pipe = getattr(diffusers, name).from_pretrained(path, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)

    def __call__(self, prompt: str, seed: int, call: dict[str, Any]) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        return np.asarray(self.pipe(prompt=prompt, generator=generator, **call, output_type="np")[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_alone_and_among_others_a_request_equals_diffusers(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    bare, call = Bare(name, tmp_path), CALLS[name]
    expected = [bare(prompt, seed, call) for seed, prompt in enumerate(PROMPTS)]
    assert np.abs(expected[0] - bare(PROMPTS[1], 0, call)).max() > 1e-3, "the output depends on the prompt"
    assert PipelineInfo.load(str(tmp_path), DiTConfig()).output_type == ("image" if expected[0].ndim == 3 else "video")

    harness = Harness(tmp_path, max_batch_size=6)
    for number in (1, 6):
        for seed, prompt in enumerate(PROMPTS[:number]):
            harness.add_job(prompt, {"prompt": prompt, **call}, seed)
        harness.run()
        for prompt, one in zip(PROMPTS[:number], expected, strict=False):
            end = harness.ends[prompt]
            assert end.error is None, end.traceback
            np.testing.assert_allclose(end.output.numpy(), one, rtol=0, atol=1e-4, err_msg=prompt)
    alone = ALONE.get(name)
    assert harness.executor.unbatched == ([] if alone is None else [alone])
    assert max(harness.batches) == (1 if "PAG" in name else 6)


def table() -> str:
    """Of the classes in `CALLS`, in the format of the document."""
    apart = {"all": "together", "network": "one request at a time in one network", "job": "one request at a time"}
    kinds = {name: "job" if "PAG" in name else "network" if name in ALONE else "all" for name in CALLS}
    listed = {kind: ", ".join(f"`{name}`" for name in CALLS if kinds[name] == kind) for kind in apart}
    rows = [f"| {words} | {listed[kind]} |" for kind, words in apart.items()]
    return "\n".join(["| requests are computed | diffusers' pipelines |", "|---|---|", *rows])


def test_the_document_lists_these_classes() -> None:
    assert f"\n\n{table()}\n\n" in DOCUMENT.read_text()


if __name__ == "__main__":
    print(table())
