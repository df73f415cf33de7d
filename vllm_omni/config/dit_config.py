# SPDX-License-Identifier: Apache-2.0
"""`engine_args` of a diffusion stage: how its diffusers pipeline is loaded and run. It imports no diffusers."""

from typing import Any, Literal

import msgspec


class DiTConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a diffusion stage (`engine_type: DiT`).

    Attributes:
        model: The stage's own checkpoint, where it is not the pipeline's.
        model_stage: The stage's name.
        engine_output_type: What the stage makes for other stages; for information only.
        pipeline_class: Name of the diffusers class; default: what `model_index.json` says.
        part: What of the pipeline this stage runs: all of it (`pipeline`), only the encoding of prompts (`encoder`), or
            everything after that (`denoiser`). A part loads no weights but its own.
        dtype: Of the weights: `auto` is bfloat16 on an accelerator, float32 on a CPU.
        revision, variant: Of the checkpoint on the hub, and of its files (`fp16`).
        use_safetensors: Refuse weights that are pickled.
        trust_remote_code: Run code that comes with the checkpoint.
        vae_slicing, vae_tiling: Decode images one by one, and piece by piece: less memory.
        offload: Keep weights on the CPU while they are not needed: whole components (`model`), groups of layers
            (`group`), or single layers (`sequential`).
        attention_backend: One of diffusers' attention backends.
        cache_backend, cache_config: One of diffusers' caching methods for denoisers, and its settings. Such a stage
            computes one image at a time: what is cached depends on all images of a batch.
        compile: Compile the denoiser with torch.compile.
        quantization: Arguments of diffusers' `PipelineQuantizationConfig`.
        max_loras: LoRA adapters that are kept loaded.
        batch_wait_ms: How long an idle stage waits for company when a request arrives.
        max_pixels: Largest height x width of an output, and of an input image.
        max_frames, max_steps, max_outputs: Largest number of frames, of steps, and of outputs for one prompt.
        preview_size: Longer side of a preview, pixels, about.
    """

    model: str | None = None
    model_stage: str = ""
    engine_output_type: str | None = None
    pipeline_class: str | None = None
    part: Literal["pipeline", "encoder", "denoiser"] = "pipeline"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    revision: str | None = None
    variant: str | None = None
    use_safetensors: bool = True
    trust_remote_code: bool = False
    vae_slicing: bool = False
    vae_tiling: bool = False
    offload: Literal["model", "group", "sequential"] | None = None
    attention_backend: str | None = None
    cache_backend: str | None = None
    cache_config: dict[str, Any] = {}
    compile: bool = False
    quantization: dict[str, Any] | None = None
    max_loras: int = 8
    batch_wait_ms: float = 2.0
    max_pixels: int = 2048 * 2048
    max_frames: int = 257
    max_steps: int = 200
    max_outputs: int = 16
    preview_size: int = 256
