# SPDX-License-Identifier: Apache-2.0
"""`engine_args` of a diffusion stage: how its diffusers pipeline is loaded and run.

Independent of diffusers, the checkpoint and the device: `diffusion/loader.py` refuses settings that they do not
support.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vllm_omni.config.utils import parse_engine_args
from vllm_omni.errors import StageConfigError

DIT_PARALLEL_SIZES = ("data_parallel_size", "ulysses_degree", "ring_degree")
"""Settings whose product is the number of devices."""

_MINIMUM = {
    **dict.fromkeys(DIT_PARALLEL_SIZES, 1),
    "max_batch_size": 1,
    "max_loras": 1,
    "batch_wait_ms": 0,
    "prompt_cache_bytes": 0,
    "max_pixels": 1,
    "max_frames": 1,
    "max_steps": 1,
    "max_seconds": 0,
    "max_outputs": 1,
    "preview_size": 1,
    "max_trajectory_bytes": 0,
}
# Settings of the denoiser and the VAE, which an encoder stage does not have.
_NOT_FOR_ENCODERS = (
    *("vae_slicing", "vae_tiling", "attention_backend", "cache_backend", "compile"),
    *DIT_PARALLEL_SIZES,
)
# Settings that change the denoiser in one process only.
_NOT_ON_SEVERAL_DEVICES = ("offload", "cache_backend", "compile", "quantization", "lora_modules")


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Settings of a diffusion stage (`engine_type: DiT`)."""

    model: str | None = None
    """The stage's own checkpoint. Default: the pipeline's."""
    model_stage: str | None = None
    """The stage's name."""
    engine_output_type: str | None = None
    """The output for other stages; for information only."""
    pipeline_class: str | None = None
    """Name of the diffusers class, or the dotted path of another one. Default: the class in `model_index.json`."""
    part: Literal["pipeline", "encoder", "denoiser"] | list[str] = "pipeline"
    """The part of the pipeline that this stage runs: all of it (`pipeline`), only the encoding of prompts (`encoder`),
    everything after that (`denoiser`), or a list of components, if other stages make what the rest would. The stage
    loads the weights of its part only."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights: `auto` is bfloat16 on an accelerator, float32 on a CPU."""
    revision: str | None = None
    """Revision of the checkpoint on the hub."""
    variant: str | None = None
    """Variant of the checkpoint's weight files, such as `fp16`."""
    use_safetensors: bool = True
    """Refuse pickled weights."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint."""
    vae_slicing: bool = False
    """Decode the images of a batch one by one: less memory."""
    vae_tiling: bool = False
    """Decode images in tiles: less memory."""
    offload: Literal["model", "group", "sequential"] | None = None
    """Keep unused weights on the CPU: whole components (`model`), groups of layers (`group`), or single layers
    (`sequential`)."""
    attention_backend: str | None = None
    """One of diffusers' attention backends."""
    cache_backend: str | None = None
    """One of diffusers' caching methods for denoisers. Each output has a cache of its own: it is computed in turn with
    others, never in one batch with them, and takes its memory until it ends."""
    cache_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the `cache_backend`, as JSON or YAML: `{threshold: 0.1}`."""
    compile: bool = False
    """Compile the denoiser with torch.compile."""
    quantization: dict[str, Any] | None = None
    """Arguments of diffusers' `PipelineQuantizationConfig`."""
    data_parallel_size: int = 1
    """Copies of the denoiser, each on a device, or on the several of `ulysses_degree` or `ring_degree`, that share the
    rows of a batch: its guided and its unguided half, and outputs of several requests."""
    ulysses_degree: int = 1
    """Devices that share each row of a batch by its tokens, with diffusers' Ulysses attention."""
    ring_degree: int = 1
    """Devices that share each row of a batch by its tokens, with diffusers' ring attention. Accelerators only."""
    max_loras: int = 8
    """LoRA adapters that stay loaded."""
    lora_modules: dict[str, str] = field(default_factory=dict)
    """Adapters, name to file, that are checked when the stage starts (`vllm serve --lora-modules`)."""
    max_batch_size: int | None = None
    """Outputs that are computed at once (`runtime.max_batch_size`). Default: 4; 2 with a cache; 1 with a cache that is
    compiled, or if whole components are offloaded: then others wait for the end of a long output."""
    batch_wait_ms: float = 2.0
    """Batching delay: milliseconds that an idle stage waits for further requests when one arrives."""
    prompt_cache_bytes: int = 256 << 20
    """Host memory, at most, for encoded prompts: a request that repeats one does not encode it again. 0: none."""
    max_pixels: int = 2048 * 2048
    """Largest height x width of an output, and of an input image."""
    max_frames: int = 257
    """Largest number of frames of a video."""
    max_steps: int = 200
    """Largest number of denoising steps."""
    max_seconds: float = 600.0
    """Longest sound, in seconds, where the pipeline has an argument for it."""
    max_outputs: int = 16
    """Largest number of outputs of one prompt."""
    preview_size: int = 256
    """Approximate longer side of a preview, in pixels."""
    max_trajectory_bytes: int = 1 << 30
    """Host memory, at most, for the steps of all outputs of a request with `return_trajectory`."""
    profiler_config: dict[str, Any] | None = None
    """Fields of vLLM's `ProfilerConfig`, as `{profiler: torch, torch_profiler_dir: /tmp/traces}`."""

    @property
    def context_parallel_size(self) -> int:
        """How many devices compute one row together."""
        return self.ulysses_degree * self.ring_degree

    @property
    def world_size(self) -> int:
        """How many processes, each with a device, the denoiser runs in."""
        return math.prod(getattr(self, name) for name in DIT_PARALLEL_SIZES)


DIT_SETTINGS = tuple(setting.name for setting in fields(DiTConfig))
"""The names of all settings."""


def parse_dit_config(engine_args: Mapping[str, Any], where: str) -> DiTConfig:
    """Parses and checks the settings of a diffusion stage.

    Args:
        engine_args: As in the stage configuration.
        where: The stage, for messages, e.g. `stage 0 (dit)`.

    Raises:
        StageConfigError: A key is unknown (names the nearest), a value has the wrong type or is out of range, or two
            settings contradict each other.
    """
    where = f"{where}: engine_args"
    config = parse_engine_args(engine_args, DiTConfig, where, "diffusion")
    for key, minimum in _MINIMUM.items():
        value = getattr(config, key)
        if value is not None and not minimum <= value < float("inf"):
            raise StageConfigError(f"{where}.{key}: {value} is out of range; it must be {minimum} or more")
    _check_contradictions(config, where)
    return config


def _check_contradictions(config: DiTConfig, where: str) -> None:
    if config.cache_backend is not None and config.compile and (config.max_batch_size or 1) > 1:
        raise StageConfigError(
            f"{where}.cache_backend: a compiled denoiser has one cache, so outputs are made one at a time; remove "
            f"compile, or max_batch_size {config.max_batch_size}"
        )
    if config.cache_config and config.cache_backend is None:
        raise StageConfigError(f"{where}.cache_config: there is no cache_backend that it configures; set one")
    if config.ulysses_degree > 1 and config.ring_degree > 1:
        raise StageConfigError(
            f"{where}.ring_degree: diffusers has no method with both that takes sequences of any length; remove it, or "
            "ulysses_degree"
        )
    for key in _NOT_ON_SEVERAL_DEVICES:
        if config.world_size > 1 and getattr(config, key):
            used = next(name for name in DIT_PARALLEL_SIZES if getattr(config, name) > 1)
            raise StageConfigError(f"{where}.{key}: is not supported together with {used}; remove one of them")
    for key in _NOT_FOR_ENCODERS:
        if config.part == "encoder" and getattr(config, key) != getattr(DiTConfig, key):
            raise StageConfigError(
                f"{where}.{key}: does not apply to a stage that only encodes prompts (part: encoder); set it in the "
                "stage with part: denoiser"
            )
