# SPDX-License-Identifier: Apache-2.0
"""What a request can ask of a diffusion stage, and what the stage is told of it.

Names are those of diffusers' pipelines; which of them a pipeline takes is for `pipeline_info.py` to say.
"""

from typing import Any, Literal

import msgspec
import torch

OutputFormat = Literal["pil", "np", "png", "jpeg", "webp", "mp4", "latent"]


class DiffusionSamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of one request. None means the pipeline's own default.

    Attributes:
        negative_prompt: What the picture shall not show.
        height, width: Pixels.
        num_inference_steps: Denoising steps.
        guidance_scale, true_cfg_scale: How closely the prompt is followed: by guidance as the model was trained or
            distilled for, and by comparing with the negative prompt.
        strength: How far an input image is changed, 0 to 1.
        num_outputs_per_prompt: Images, videos or clips to make.
        seed: Of the first output, the next ones have `seed + 1`, ...; or a list with one for each output. None: fresh
            ones. An output depends on its own seed only.
        num_frames: Frames of a video.
        fps: Frames of a video in a second.
        output_format: Pictures as `pil` (the default), `np` (float32 in [0, 1]), `png`, `jpeg` or `webp` files, or
            `latent`; videos as `pil` (a list of frames), `np` (the default), `mp4` or `latent`; sound as `np` or
            `latent`.
        output_quality: Of `jpeg` and `webp`, 1 to 100.
        preview_every: A small picture of what there is so far after every so many steps; 0: none.
        lora_scale: How strongly the request's LoRA adapter counts.
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
    extra_args: dict[str, Any] = {}


class DiffusionRequest(msgspec.Struct, kw_only=True):
    """What a diffusion stage is told of one request; all of it checked.

    Attributes:
        params: The settings, the stage's defaults filled in.
        seeds: One for each output.
        images: Input images, uint8 `[height, width, 3]`, or `[..., 4]` with transparency.
        lora_name, lora_path: The LoRA adapter, if there is one.
    """

    params: DiffusionSamplingParams
    seeds: list[int]
    images: list[torch.Tensor] = []
    lora_name: str | None = None
    lora_path: str | None = None
