# SPDX-License-Identifier: Apache-2.0
"""`engine_args` of a diffusion stage: how its diffusers pipeline is loaded and run.

What diffusers, the checkpoint or the device lack is not known here: `diffusion/loader.py` refuses that.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from vllm_omni.config.utils import convert, nearest, split_error
from vllm_omni.errors import StageConfigError

# Each must be at least this.
_SMALLEST = {
    "max_batch_size": 1,
    "max_loras": 1,
    "batch_wait_ms": 0,
    "max_pixels": 1,
    "max_frames": 1,
    "max_steps": 1,
    "max_outputs": 1,
    "preview_size": 1,
}
# What concerns the denoiser and the VAE, which an encoder stage does not have.
_NOT_FOR_ENCODERS = ("vae_slicing", "vae_tiling", "attention_backend", "cache_backend", "compile")


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
            makes one output at a time: what is cached depends on all outputs of a batch.
        compile: Compile the denoiser with torch.compile.
        quantization: Arguments of diffusers' `PipelineQuantizationConfig`.
        max_loras: LoRA adapters that are kept loaded.
        lora_modules: Adapters, name to file, that are checked when the stage starts (`vllm serve --lora-modules`).
        max_batch_size: Outputs that it works on at once (`runtime.max_batch_size`); None: 4, or 1 with a cache, or
            where whole components are offloaded.
        batch_wait_ms: How long an idle stage waits for company when a request arrives.
        max_pixels: Largest height x width of an output, and of an input image.
        max_frames, max_steps, max_outputs: Largest number of frames, of steps, and of outputs for one prompt.
        preview_size: Longer side of a preview, pixels, about.
    """

    model: str | None = None
    model_stage: str | None = None
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
    lora_modules: dict[str, str] = {}
    max_batch_size: int | None = None
    batch_wait_ms: float = 2.0
    max_pixels: int = 2048 * 2048
    max_frames: int = 257
    max_steps: int = 200
    max_outputs: int = 16
    preview_size: int = 256


def parse_dit_config(engine_args: Mapping[str, Any], where: str) -> DiTConfig:
    """The settings of a diffusion stage, checked.

    Args:
        engine_args: As they stand in the stage configuration.
        where: Whose they are, for messages, e.g. `stage 0 (dit)`.

    Raises:
        StageConfigError: A key is unknown (names the nearest), a value has the wrong type or is out of range, or two
            settings contradict each other.
    """
    where = f"{where}: engine_args"
    known = DiTConfig.__struct_fields__
    for key in engine_args:
        if key not in known:
            raise StageConfigError(
                f"{where}: a diffusion stage has no {key!r}{nearest(key, known)} (known here: {', '.join(known)})"
            )
    try:
        config = convert(dict(engine_args), DiTConfig)
    except msgspec.ValidationError as error:
        problem, key = split_error(error)
        raise StageConfigError(f"{where}.{key or '?'}: {problem}{_choices(key)}") from error
    _check_ranges(config, where)
    _check_contradictions(config, where)
    return config


def _choices(key: str) -> str:
    """The values that a setting may have, where they can be counted."""
    hint = DiTConfig.__annotations__.get(key)
    values = [value for one in (hint, *get_args(hint)) if get_origin(one) is Literal for value in get_args(one)]
    return f" (known here: {', '.join(values)})" if values else ""


def _check_ranges(config: DiTConfig, where: str) -> None:
    for key, smallest in _SMALLEST.items():
        value = getattr(config, key)
        if value is not None and not smallest <= value < float("inf"):
            raise StageConfigError(f"{where}.{key}: {value} is out of range; it must be {smallest} or more")


def _check_contradictions(config: DiTConfig, where: str) -> None:
    if config.cache_backend is not None and (config.max_batch_size or 1) > 1:
        raise StageConfigError(
            f"{where}.cache_backend: what is cached depends on all outputs of a batch, so they are made one at a time; "
            f"remove it, or max_batch_size {config.max_batch_size}"
        )
    if config.cache_config and config.cache_backend is None:
        raise StageConfigError(f"{where}.cache_config: there is no cache_backend that it could be for; name one")
    for key in _NOT_FOR_ENCODERS:
        if config.part == "encoder" and getattr(config, key):
            raise StageConfigError(
                f"{where}.{key}: this stage only encodes prompts (part: encoder), it has nothing that this applies to; "
                "give it to the stage with part: denoiser"
            )
