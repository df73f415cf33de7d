# SPDX-License-Identifier: Apache-2.0
"""Previews against what diffusers' own pipelines make of the same latents, and estimates against a known flow."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from tests.simulated_device import DEVICE, simulate_device
from vllm_omni.diffusion.preview import check_previews, estimate_clean, make_preview

HEIGHT, WIDTH = 64, 96
CALLS = {
    "z_image": {},
    "qwen_image": {"negative_prompt": "dark"},
    "flux": {},
    "flux2_klein": {},
    "stable_diffusion_3": {},
    "wan": {"num_frames": 9},
}
MIDDLE_FRAME = 4  # of 9


@pytest.fixture(scope="module", params=CALLS)
def run(request, tiny_diffusion):
    """A pipeline, its image (float32 `[3, h, w]`), and its latents after each step."""
    pipe = DiffusionPipeline.from_pretrained(tiny_diffusion(request.param))
    pipe.set_progress_bar_config(disable=True)
    if hasattr(pipe.vae, "bn"):  # statistics that change nothing could be left out unnoticed
        pipe.vae.bn.running_mean.uniform_(-0.5, 0.5)
        pipe.vae.bn.running_var.uniform_(0.5, 2.0)
    latents: list[torch.Tensor] = []

    def keep(_pipe, _step, _timestep, tensors):
        latents.append(tensors["latents"])
        return {}

    call = {"prompt": "a red cat", "height": HEIGHT, "width": WIDTH, "num_inference_steps": 3} | CALLS[request.param]
    generator = torch.Generator().manual_seed(5)
    made = pipe(**call, generator=generator, output_type="pt", callback_on_step_end=keep)[0]
    image = made[0] if made.dim() == 4 else made[0, MIDDLE_FRAME]
    return SimpleNamespace(pipe=pipe, image=image, latents=latents)


@pytest.mark.parametrize("name", ["z_image", "flux2_klein", "wan"])
def test_a_preview_is_made_on_the_device(name, tiny_diffusion):
    """Latents in a grid, patches with statistics of the VAE's, and a video; what a preview becomes is on the CPU."""
    pipe = DiffusionPipeline.from_pretrained(tiny_diffusion(name))
    torch.manual_seed(0)
    shape = {"z_image": (1, 16, 8, 12), "flux2_klein": (1, 24, 64), "wan": (1, 16, 3, 8, 12)}[name]
    latents = torch.randn(shape)
    expected = make_preview(pipe, latents, HEIGHT, WIDTH, longer_side=48)
    with simulate_device():
        pipe.vae.to(DEVICE)
        preview = make_preview(pipe, latents.to(DEVICE), HEIGHT, WIDTH, longer_side=48)
        assert type(preview) is torch.Tensor
        assert (preview.int() - expected.int()).abs().max() <= 1


def test_a_preview_of_finished_latents_is_the_image(run):
    preview = make_preview(run.pipe, run.latents[-1], HEIGHT, WIDTH, longer_side=256)
    assert (preview.dtype, preview.shape) == (torch.uint8, (HEIGHT, WIDTH, 3))
    expected = (run.image.permute(1, 2, 0) * 255).round()
    assert (preview.float() - expected).abs().max() <= 1
    assert expected.std() > 10, "a grey image would prove nothing"


def test_check_previews_accepts_pipelines_with_previews(run):
    check_previews(run.pipe)


def test_a_preview_is_small_and_shows_the_current_state(run):
    previews = [make_preview(run.pipe, latents, HEIGHT, WIDTH, longer_side=48) for latents in run.latents]
    assert all(preview.shape == (32, 48, 3) for preview in previews)
    assert (previews[0].float() - previews[-1].float()).abs().mean() > 1


@pytest.fixture(scope="module")
def image_vae():
    return AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)


def pipeline_like(**parts):
    return type("OddPipeline", (), parts)()


@pytest.mark.parametrize(
    "latents",
    [torch.zeros(1, 64, 100), torch.zeros(1, 3, 8, 8), torch.zeros(1, 4, 5, 8, 8), torch.zeros(1, 4)],
    ids=["sound", "channels", "video from an image's VAE", "flat"],
)
def test_latents_of_an_unsupported_form_are_refused(image_vae, latents):
    with pytest.raises(ValueError, match=r"OddPipeline has no previews: the form of its latents \[1, "):
        make_preview(pipeline_like(vae=image_vae), latents, 64, 64, 32)


def test_packed_latents_of_another_size_are_refused(tiny_diffusion):
    pipe = DiffusionPipeline.from_pretrained(tiny_diffusion("flux"))
    with pytest.raises(ValueError, match="FluxPipeline has no previews"):
        make_preview(pipe, torch.zeros(1, 7, 64), HEIGHT, WIDTH, 32)


def test_frames_before_channels_are_not_taken_for_channels():
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",),
        up_block_types=("CogVideoXUpBlock3D",),
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
    )
    assert_refused_beforehand(pipeline_like(vae=vae), "latents is not supported", torch.zeros(1, 16, 16, 8, 8))


def test_a_pipeline_without_a_vae_is_refused():
    assert_refused_beforehand(pipeline_like(), "has no VAE", torch.zeros(1, 4, 8, 8))


def test_unsupported_unpacking_of_latents_is_refused(image_vae):
    unpack = staticmethod(lambda latents, num_frames, height, width: latents)
    assert_refused_beforehand(
        pipeline_like(vae=image_vae, _unpack_latents=unpack), "unpacked by num_frames", torch.zeros(1, 64, 16)
    )


def assert_refused_beforehand(pipe, problem, latents):
    for refuse in (lambda: check_previews(pipe), lambda: make_preview(pipe, latents, 64, 64, 32)):
        with pytest.raises(ValueError, match=f"OddPipeline has no previews: .*{problem}"):
            refuse()


FLOWS = {
    "euler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "multistep": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
}


@pytest.mark.parametrize("scheduler", FLOWS.values(), ids=FLOWS.keys())
def test_the_estimate_of_a_straight_flow_is_its_end_from_the_first_step_on(scheduler):
    clean, noise = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    scheduler.set_timesteps(4)
    sample, first = noise, float(scheduler.sigmas[0])
    sample = (1 - first) * clean + first * noise
    for step, timestep in enumerate(scheduler.timesteps):
        before, sample = sample, scheduler.step(noise - clean, timestep, sample, return_dict=False)[0]
        torch.testing.assert_close(estimate_clean(scheduler, step, before, sample), clean, atol=1e-4, rtol=0)
    assert scheduler.step_index == 4


def test_the_estimate_of_an_image_to_image_run_starts_later():
    clean, noise = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    scheduler.set_begin_index(2)
    level = scheduler.sigmas[2]
    before = (1 - level) * clean + level * noise
    after = scheduler.step(noise - clean, scheduler.timesteps[2], before, return_dict=False)[0]
    torch.testing.assert_close(estimate_clean(scheduler, 0, before, after), clean, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "scheduler", [DDIMScheduler(), FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)], ids=["ddim", "noisy"]
)
def test_no_estimate_without_a_flow(scheduler):
    scheduler.set_timesteps(4)
    before, after = torch.randn(2, 1, 4, 8, 8)
    assert estimate_clean(scheduler, 0, before, after) is after


def test_no_estimate_for_a_step_outside_the_schedule():
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(2)
    before, after = torch.randn(2, 1, 4, 8, 8)
    assert estimate_clean(scheduler, 2, before, after) is after


def test_an_estimate_keeps_the_dtype_of_the_latents():
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    before, after = torch.randn(2, 1, 4, 8, 8).bfloat16()
    estimate = estimate_clean(scheduler, 1, before, after)
    assert estimate.dtype == torch.bfloat16
    assert np.isfinite(estimate.float().numpy()).all()
