# SPDX-License-Identifier: Apache-2.0
"""What tiny diffusers pipelines share: an image VAE, and random weights that produce varied images.

Independent of the pipeline. `fill_random` leaves the scale of the denoiser's velocity and of the decoder's image
undefined; `calibrate` sets scales at which images are neither grey nor clipped, and depend on their inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from torch import nn

from vllm_omni.testing.tiny.weights import fill_random, scale_output

VELOCITY_STD = 1.0
IMAGE_STD = 0.4
"""Of pixels, which diffusers cuts at -1 and 1."""
LATENT_CHANNELS = 16
MEANS_GAIN, LOG_VARIANCE = 4.0, -10.0
_PROMPT = "a red cat by the sea"


@dataclass(frozen=True)
class Size:
    """Everything in which the sizes of a checkpoint differ. `axes` are the parts of a head that know the position."""

    layers: int
    heads: int
    axes: tuple[int, int, int]
    text_hidden: int
    text_layers: int


def make_image_vae(channels: tuple[int, ...] = (8, 16, 16, 16), **settings: Any) -> AutoencoderKL:
    """The autoencoder of SD3, Flux and Z-Image: 8 pixels a latent on each side, 16 channels, no quantization layers.

    Args:
        settings: Further ones of the class.
    """
    blocks = len(channels)
    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
        **settings,
    )


def fill_components(pipe: DiffusionPipeline, seed: int, gains: dict[str, float]) -> None:
    """Overwrites the weights of the components that `gains` names, each with a seed of its own.

    Args:
        gains: Name of the component -> `layer_gain` of `fill_random`.
    """
    for index, (name, gain) in enumerate(sorted(gains.items())):
        module: nn.Module = pipe.components[name].eval()
        fill_random(module, 16 * seed + index, gain)
        if isinstance(module, AutoencoderKL):
            _scale_latents(module.encoder.conv_out)


@torch.no_grad()
def _scale_latents(conv_out: nn.Conv2d) -> None:
    """Gives an encoder low variances, as trained ones have, and latents of about the scale of noise."""
    assert conv_out.bias is not None
    means = conv_out.out_channels // 2  # the other channels are logarithms of variances
    conv_out.weight[:means] *= MEANS_GAIN
    conv_out.weight[means:] = 0
    conv_out.bias[means:] = LOG_VARIANCE


def calibrate(pipe: DiffusionPipeline, velocity: nn.Module, decoded: nn.Module, **call: Any) -> None:
    """Scales the last layers of the denoiser and of the decoder to outputs of a given standard deviation.

    Args:
        velocity, decoded: Those layers. They are scaled by powers of two.
        call: Arguments of the pipeline besides the prompt: the size of the output, and required ones.
    """
    for layer, std in ((velocity, VELOCITY_STD), (decoded, IMAGE_STD)):
        scale_output(layer, std, lambda: run_two_steps(pipe, **call))


def run_two_steps(pipe: DiffusionPipeline, **call: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt=_PROMPT, num_inference_steps=2, generator=generator, output_type="pt", **call)
