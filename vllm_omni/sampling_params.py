# SPDX-License-Identifier: Apache-2.0
"""The parameters of a request for a diffusion stage.

Names are those of diffusers' pipelines; `pipeline_info.py` determines which of them a pipeline supports.
"""

from typing import Any, Literal

import msgspec
import torch

OutputFormat = Literal["pil", "np", "png", "jpeg", "webp", "mp4", "latent"]


class DiffusionSamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of one request. None means the pipeline's own default.

    Attributes:
        negative_prompt: What the output should not contain.
        height, width: Pixels.
        num_inference_steps: Denoising steps.
        guidance_scale, true_cfg_scale: Weight of the prompt: in guidance that the model was trained or distilled for,
            and in classifier-free guidance with the negative prompt.
        strength: How far an input image is changed, 0 to 1.
        num_outputs_per_prompt: Number of images, videos or clips.
        seed: Of the first output, further ones have `seed + 1`, ...; or a list with one for each output. None: random
            seeds. An output depends on its own seed only.
        num_frames: Frames of a video.
        fps: Frames per second of a video.
        output_format: Images as `pil` (the default), `np` (float32 in [0, 1]), `png`, `jpeg` or `webp` files, or
            `latent`; videos as `pil` (a list of frames), `np` (the default), `mp4` or `latent`; sound as `np` or
            `latent`.
        output_quality: Of `jpeg` and `webp`, 1 to 100.
        preview_every: Number of steps between small previews; 0: no previews.
        lora_scale: Weight of the request's LoRA adapter.
        stochastic_sampling: Each step adds new noise, as a trainer needs it: diffusers' setting of this name of
            `FlowMatchEulerDiscreteScheduler`. None: as the checkpoint has it.
        return_trajectory: Return the latents, the noise and the log-probability of each step
            (`OmniRequestOutput.trajectories`). Not over HTTP.
        extra_args: Further arguments of the diffusers pipeline, by name, e.g. `{"max_sequence_length": 256}`.
    """

    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    strength: float | None = None
    num_outputs_per_prompt: int = 1
    seed: int | list[int] | None = None
    num_frames: int | None = None
    fps: float | None = None
    output_format: OutputFormat | None = None
    output_quality: int = 90
    preview_every: int = 0
    lora_scale: float = 1.0
    stochastic_sampling: bool | None = None
    return_trajectory: bool = False
    extra_args: dict[str, Any] = {}


class MediaInput(msgspec.Struct, kw_only=True):
    """The value of a media argument of a pipeline's call, or a part of it.

    Attributes:
        kind: `image`, whose `tensor` is uint8 `[height, width, 1 or 3]`; `frames`, `[frames, height, width, 1 or 3]`; a
            `tensor` or an `array` in the pipeline's own format; a list of `items`; the `fields` of a dataclass, with
            media and `plain` values.
    """

    kind: Literal["image", "frames", "tensor", "array", "items", "fields", "plain"]
    tensor: torch.Tensor | None = None
    items: list["MediaInput"] = []
    fields: dict[str, "MediaInput"] = {}
    plain: bool | int | float | str | None = None


class DiffusionRequest(msgspec.Struct, kw_only=True):
    """The checked parameters of one request for a diffusion stage.

    Attributes:
        params: The settings, with the stage's defaults.
        seeds: One for each output.
        images: Input images (`image`), uint8 `[height, width, 3]`, or `[..., 4]` with transparency.
        media: Other media arguments of the pipeline's call, by name.
        lora_name, lora_path: The LoRA adapter, if any.
    """

    params: DiffusionSamplingParams
    seeds: list[int]
    images: list[torch.Tensor] = []
    media: dict[str, MediaInput] = {}
    lora_name: str | None = None
    lora_path: str | None = None
