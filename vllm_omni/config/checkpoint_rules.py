# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's own stage configuration may set.

Whoever serves a checkpoint did not write that file. It describes the pipeline: the stages, their graph, windows, limits
and sampling defaults. Code is named as in the stage configurations of installed packages, and other checkpoints are
folders of this one. Everything else (classes, pickles, paths, addresses, options of the machine) is the operator's.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import yaml

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.config.utils import convert_config
from vllm_omni.errors import StageConfigError
from vllm_omni.model_packages import find_models

_FUNCTIONS = ("custom_process_input_func", "custom_prompt_func", "function", "batch_function")
_CLASSES = ("worker_cls", "scheduler_cls", "pipeline_class")
_STAGE_KEYS = {
    *("stage_id", "engine_type", "stage_type", "runtime", "engine_args", "engine_input_source", "is_comprehension"),
    *("accepts", "final_output", "final_output_type", "sample_rate", "reads", "only_if", "default_sampling_params"),
    *("transcription_prompt", "translation_prompt"),
}
_STAGE_RUNTIME_KEYS = {
    *("devices", "memory", "max_batch_size", "max_inflight", "max_queued", "step_timeout_s"),
    "requires_multimodal_data",
}
_RUNTIME_KEYS = {
    *("enabled", "defaults", "ar", "edges", "max_inflight", "max_queued", "request_timeout_s", "stage_init_timeout"),
}
_ENGINE_ARGS = {
    # of vLLM stages
    *("model_stage", "model_arch", "hf_config_name", "engine_output_type", "dtype", "skip_tokenizer_init"),
    *("generation_config", "scheduling_policy"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "limit_mm_per_prompt"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "block_size", "row_cache_bytes"),
    "mm_processor_cache_gb",
    *("enable_prompt_embeds", "enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"),
    # of diffusion stages
    *("part", "variant", "vae_slicing", "vae_tiling", "max_batch_size", "batch_wait_ms", "prompt_cache_bytes"),
    *("max_pixels", "max_frames", "max_steps", "max_outputs", "preview_size"),
}
_FOLDERS = ("model", "tokenizer")
_Code: TypeAlias = list[tuple[str, Any]]  # keys and dotted paths of functions and classes
_GENERATION_CONFIGS = ("auto", "vllm")  # Anything else is a path.
_REMEDY = "remove the key, or, if you have read the file and trust it, start with --trust-remote-code"


def check_checkpoint_config(config: PipelineConfig, folder: Path) -> None:
    """Refuses what a checkpoint may not set for whoever serves it. Imports nothing.

    Args:
        config: From the file in the checkpoint, parsed and not yet checked.
        folder: The checkpoint.

    Raises:
        StageConfigError: A key is not one of those that are allowed, or its value names other code or another folder.
    """
    registered = _registered_code()
    for stage in config.stage_args:
        where = stage.label
        _check_keys(stage, {*_STAGE_KEYS, *_FUNCTIONS}, f"{where}: ")
        _check_keys(stage.runtime, _STAGE_RUNTIME_KEYS, f"{where}: runtime.")
        for key in _FUNCTIONS:
            _check_code(key, getattr(stage, key), registered, f"{where}: {key}")
        for key, value in stage.engine_args.items():
            _check_engine_arg(key, value, registered, f"{where}: engine_args.{key}", folder)
    _check_keys(config.runtime, _RUNTIME_KEYS, "runtime.")


def _check_keys(struct: msgspec.Struct, allowed: Collection[str], where: str) -> None:
    """A value that equals the default sets nothing."""
    default = type(struct)(**{name: getattr(struct, name) for name in ("stage_id",) if hasattr(struct, name)})
    for name in struct.__struct_fields__:
        if name not in allowed and getattr(struct, name) != getattr(default, name):
            raise _refusal(f"{where}{name}")


def _check_engine_arg(key: str, value: Any, registered: _Code, where: str, folder: Path) -> None:
    if key in _FOLDERS:
        inside = (folder / str(value)).resolve()
        if not (inside.is_relative_to(folder.resolve()) and inside.is_dir()):
            raise _refusal(where, f"{value!r} is no folder of the checkpoint")
    elif key in _CLASSES:
        if key != "pipeline_class" or "." in str(value):  # Without dots it is a class of diffusers.
            _check_code(key, value, registered, where)
    elif key == "generation_config" and value not in _GENERATION_CONFIGS:
        raise _refusal(where, f"{value!r} is not one of {', '.join(_GENERATION_CONFIGS)}")
    elif key not in _ENGINE_ARGS:
        raise _refusal(where)


def _check_code(key: str, path: Any, registered: _Code, where: str) -> None:
    if path is not None and (key, path) not in registered:
        raise _refusal(where, f"{path!r} is in no stage configuration of an installed package")


def _registered_code() -> _Code:
    """The code in the stage configurations of installed packages."""
    found = []
    for file in find_models().stage_configs.values():
        try:
            stages = convert_config(yaml.safe_load(file.read_text(encoding="utf-8")), PipelineConfig).stage_args
        except (OSError, yaml.YAMLError, msgspec.ValidationError):
            continue  # The error of whoever uses that file.
        for stage in stages:
            found += [(key, getattr(stage, key)) for key in _FUNCTIONS]
            found += [(key, stage.engine_args[key]) for key in _CLASSES if key in stage.engine_args]
    return found


def _refusal(where: str, problem: str = "the value is the operator's to set") -> StageConfigError:
    return StageConfigError(f"{where}: a checkpoint's own configuration may not set this: {problem}; {_REMEDY}")
