# SPDX-License-Identifier: Apache-2.0
"""Small images of an unfinished output.

They are cheap because the latents are downsampled before they are decoded: a latent pixel is nearly an average of image
pixels, so the average of some of them is that of a smaller image. The form of a pipeline's latents comes from its
configuration, its VAE and their shape. This file does not know when previews are made.
"""

import inspect
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils.torch_utils import get_module_execution_device
from torch.nn import functional

from vllm_omni.media import to_uint8

UNPACK_ARGUMENTS = frozenset({"latents", "height", "width", "vae_scale_factor", "patch_size"})
"""Supported parameters of a pipeline's `_unpack_latents`, in pixels. With others the names have another meaning."""
FRAMES_BEFORE_CHANNELS = frozenset({"AutoencoderKLCogVideoX"})
"""VAEs of pipelines whose latents are `[1, frames, channels, h, w]`; the shape does not show it."""
FLOW_SCHEDULERS = frozenset({"FlowMatchEulerDiscreteScheduler"})
"""Schedulers that integrate a flow; others do with `use_flow_sigmas`."""


def check_previews(pipe: DiffusionPipeline) -> None:
    """
    Raises:
        ValueError: `make_preview` cannot decode this pipeline's latents, as far as is known without any.
    """
    _image_vae(pipe)
    _unpack_arguments(pipe)


@torch.no_grad()
def make_preview(
    pipe: DiffusionPipeline, latents: torch.Tensor, height: int, width: int, longer_side: int
) -> torch.Tensor:
    """Decodes the current state of one output: the image, or a video's middle frame.

    Args:
        latents: Of one output, as the pipeline passes them to `callback_on_step_end`: `[1, channels, h, w]`,
            `[1, channels, frames, h, w]`, or packed, `[1, tokens, features]`.
        height, width: The output's, pixels.
        longer_side: The preview's, approximately, pixels. Smaller outputs are not enlarged.

    Returns:
        uint8 `[height, width, 3]`, on the CPU.

    Raises:
        ValueError: The form of this pipeline's latents is not supported.
    """
    vae = _image_vae(pipe)
    grid = _denormalized(pipe, vae, _unpacked(pipe, latents, height, width))
    _check_form(pipe, vae, grid)
    if grid.dim() == 5:
        # The middle frame and the one before it: such VAEs decode a frame from its difference to the one before.
        middle = grid.shape[2] // 2
        grid = grid[:, :, max(middle - 1, 0) : middle + 1]
    grid = _shrunk(grid, longer_side / max(height, width))
    image = vae.decode(grid.to(get_module_execution_device(vae), vae.dtype), return_dict=False)[0]
    if image.dim() == 5:
        image = image[:, :, -1]  # [1, channels, frames, h, w] to [1, channels, h, w]
    return _to_uint8(pipe, image)


def estimate_clean(scheduler: Any, step: int, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The final latents for a straight path from here, as in flow matching.

    Early in a run they show far more than the latents themselves, which are mostly noise.

    Args:
        scheduler: The run's own, timesteps set.
        step: The last step, from 0.
        before, after: The latents before and after it, any shape.

    Returns:
        The estimate; or `after` itself if the scheduler does not integrate a flow in noise levels.
    """
    if not _is_straight(scheduler):
        return after
    start = (scheduler.begin_index or 0) + step  # image to image starts at a later noise level
    if start + 1 >= len(scheduler.sigmas):  # the noise levels of this run have another order
        return after
    level, next_level, last_level = (float(scheduler.sigmas[i]) for i in (start, start + 1, -1))
    if next_level == level:
        return after
    velocity = (after.float() - before.float()) / (next_level - level)
    return (after.float() + (last_level - next_level) * velocity).to(after.dtype)


def _is_straight(scheduler: Any) -> bool:
    """Whether steps follow `x = (1 - sigma) * clean + sigma * noise` and add no new noise."""
    config = scheduler.config
    flow = hasattr(scheduler, "begin_index") and (
        type(scheduler).__name__ in FLOW_SCHEDULERS or config.get("use_flow_sigmas")
    )
    adds_noise = config.get("stochastic_sampling") or str(config.get("algorithm_type")).startswith("sde")
    return bool(flow) and not adds_noise


def _image_vae(pipe: Any) -> Any:
    """The pipeline's VAE, if it needs only latents to decode."""
    vae = getattr(pipe, "vae", None)
    if vae is None or not hasattr(vae, "decoder"):
        raise ValueError(f"{_name(pipe)} has no previews: it has no VAE with a supported decoder")
    if type(vae).__name__ in FRAMES_BEFORE_CHANNELS:
        raise ValueError(
            f"{_name(pipe)} has no previews: the form of its {type(vae).__name__}'s latents is not supported"
        )
    parameters = list(inspect.signature(type(vae).decode).parameters.values())[2:]  # not self, nor latents
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if needed or vae.config.get("timestep_conditioning"):
        raise ValueError(f"{_name(pipe)} has no previews: its {type(vae).__name__} needs more than latents to decode")
    return vae


def _unpack_arguments(pipe: Any) -> set[str]:
    """The parameters of the pipeline's `_unpack_latents`, if it has one."""
    if not hasattr(pipe, "_unpack_latents"):
        return set()
    wanted = set(inspect.signature(pipe._unpack_latents).parameters)
    if not wanted <= UNPACK_ARGUMENTS:
        unknown = ", ".join(sorted(wanted - UNPACK_ARGUMENTS))
        raise ValueError(
            f"{_name(pipe)} has no previews: its latents are unpacked by {unknown}, which is not supported"
        )
    return wanted


def _unpacked(pipe: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Latents as `[1, channels, h, w]` or `[1, channels, frames, h, w]`, still normalized.

    Where the VAE normalizes patches of 2 x 2 (Flux2), they stay patches.
    """
    if latents.dim() == 3 and hasattr(pipe, "_unpatchify_latents"):
        rows, columns = (side // (pipe.vae_scale_factor * 2) for side in (height, width))
        if latents.shape[1] == rows * columns:
            return latents.transpose(1, 2).unflatten(2, (rows, columns))
    elif latents.dim() == 3 and hasattr(pipe, "_unpack_latents"):
        return _unpacked_by(pipe, latents, height, width)
    elif latents.dim() in (4, 5):
        return latents
    raise _unknown_form(pipe, latents)


def _unpacked_by(pipe: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Unpacks latents with the pipeline's own method."""
    given: dict[str, Any] = {"latents": latents, "height": height, "width": width}
    given |= {name: getattr(pipe, name) for name in _unpack_arguments(pipe) - given.keys()}
    try:
        return pipe._unpack_latents(**given)
    except RuntimeError as error:  # the number of tokens is that of another size
        raise _unknown_form(pipe, latents) from error


def _denormalized(pipe: Any, vae: Any, grid: torch.Tensor) -> torch.Tensor:
    """The denoiser's latents as float32 latents of the VAE's decoder."""
    grid = grid.float()
    if hasattr(vae, "bn"):
        if not hasattr(pipe, "_unpatchify_latents"):
            raise _unknown_form(pipe, grid)
        return pipe._unpatchify_latents(_denormalized_patches(vae, grid))
    config = vae.config
    scale = config.get("scaling_factor") or 1.0
    if config.get("latents_mean") is not None and config.get("latents_std") is not None:
        mean, std = (_per_channel(torch.tensor(config[name]), grid) for name in ("latents_mean", "latents_std"))
        return grid * std / scale + mean
    return grid / scale + (config.get("shift_factor") or 0.0)


def _denormalized_patches(vae: Any, patches: torch.Tensor) -> torch.Tensor:
    """Inverts the batch norm at the end of the VAE's encoder; its channels are those of a patch."""
    variance = _per_channel(vae.bn.running_var, patches)
    return patches * torch.sqrt(variance + vae.config.batch_norm_eps) + _per_channel(vae.bn.running_mean, patches)


def _per_channel(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """`[channels]` in a shape that broadcasts over `grid`."""
    return values.to(grid.device, torch.float32).view(1, -1, *(1,) * (grid.dim() - 2))


def _check_form(pipe: Any, vae: Any, grid: torch.Tensor) -> None:
    """Compares latents with the input of the VAE's decoder: images or videos, and the number of channels."""
    channels = vae.config.get("latent_channels") or vae.config.get("z_dim")
    dims = next(weight.dim() for weight in vae.decoder.parameters() if weight.dim() > 3)  # of the first convolution
    if grid.dim() != dims or grid.shape[1] != channels:
        raise _unknown_form(pipe, grid)


def _shrunk(grid: torch.Tensor, factor: float) -> torch.Tensor:
    """Averages neighbours so that both sides are `factor` times as long; never enlarges."""
    if factor >= 1:
        return grid
    frames = grid.shape[2:-2]
    sides = (max(1, round(side * factor)) for side in grid.shape[-2:])
    return functional.interpolate(grid, size=(*frames, *sides), mode="area")


def _to_uint8(pipe: Any, image: torch.Tensor) -> torch.Tensor:
    """The VAE's pixels `[1, 3, h, w]`, -1 to 1, as `[h, w, 3]` on the CPU."""
    if image.shape[1] != 3:
        raise ValueError(f"{_name(pipe)} has no previews: its VAE makes {image.shape[1]} channels, not 3")
    pixels = image[0].permute(1, 2, 0).contiguous().cpu()
    return to_uint8(pixels.float() / 2 + 0.5)


def _unknown_form(pipe: Any, latents: torch.Tensor) -> ValueError:
    return ValueError(f"{_name(pipe)} has no previews: the form of its latents {list(latents.shape)} is not supported")


def _name(pipe: Any) -> str:
    return type(pipe).__name__
