# SPDX-License-Identifier: Apache-2.0
"""vLLM engine arguments for one stage: the caller's, and the stage's defaults.

This is the only place that decides how a stage's engine is set up; it starts nothing.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

import msgspec
import torch
import vllm.envs as envs
from pydantic import ValidationError
from vllm.config import (
    ECTransferConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    PoolerConfig,
    ProfilerConfig,
    ReasoningConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm.config.logging import LoggingConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext

from vllm_omni.config.stage_config import NotNegative
from vllm_omni.config.utils import convert, given_value, nearest, split_error
from vllm_omni.engine.argument_values import check_values
from vllm_omni.engine.hf_override import StageConfigOverride
from vllm_omni.errors import StageConfigError
from vllm_omni.metrics.logs import is_quiet
from vllm_omni.model_packages import find_models
from vllm_omni.vllm_versions import PASSED_ON_GPU

logger = init_logger("vllm.omni.engine.engine_args")

_WORKERS = {  # by engine type, and whether vLLM runs on a CPU
    ("ar", False): "vllm_omni.worker.gpu_worker.GPUARWorker",
    ("ar", True): "vllm_omni.worker.cpu_worker.CPUARWorker",
    ("generation", False): "vllm_omni.worker.gpu_worker.GPUGenerationWorker",
    ("generation", True): "vllm_omni.worker.cpu_worker.CPUGenerationWorker",
}
_SCHEDULERS = {
    "ar": "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
    "generation": "vllm_omni.core.sched.omni_generation_scheduler.OmniGenerationScheduler",
}
_ASYNC_SCHEDULER = "vllm_omni.core.sched.omni_ar_scheduler.OmniAsyncARScheduler"
_CONFIGS: dict[str, type] = {
    "structured_outputs_config": StructuredOutputsConfig,
    "reasoning_config": ReasoningConfig,
    "logging_config": LoggingConfig,
    "profiler_config": ProfilerConfig,
    "pooler_config": PoolerConfig,
    "kv_transfer_config": KVTransferConfig,
    "kv_events_config": KVEventsConfig,
    "ec_transfer_config": ECTransferConfig,
}
"""Arguments that vLLM reads as objects and does not make of a dict itself, as it does with all other configurations."""
_READ_WITH_TOKENIZER = ("reasoning_parser", "reasoning_parser_plugin", "reasoning_config", "structured_outputs_config")
_ONLY_WITHOUT_ROWS = {
    "speculative_config": "rows of rejected tokens would leave the engine",
    "kv_transfer_config": "there would be no rows of tokens whose keys and values a connector has found",
}
_ENCODER_CACHE = "vllm_omni.core.sched.encoder_cache.CountingEncoderCacheManager"
# By class path, because vLLM rewrites the name "uni" to "mp" on the CPU.
_UNIPROC_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
INT8, INT8_AUTO = "int8", "auto"
"""Quantizations of ours, see `worker/cpu_int8_weights.py`: the second one is int8 where it is faster, else none."""
HAS_INT8_PRODUCTS = torch.cpu._is_vnni_supported()
"""Whether the processor multiplies int8 (VNNI, AMX): without, oneDNN's sums of two products can be cut off."""
# By default vLLM's CPU worker takes 92% of the machine's memory, for each stage.
CPU_KV_CACHE_BYTES = 512 << 20
ROW_CACHE_BYTES = 4 << 30
USAGE_CONTEXT = UsageContext.OPENAI_API_SERVER
"""vLLM's defaults of `max_num_seqs` and `max_num_batched_tokens` depend on it: a stage has those of vLLM's server."""
_V2_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_HOOKS_BETWEEN_STEPS = ("postprocess", "make_feedback_strategy")
"""Methods of models (`SupportsPostprocess`, `SupportsFeedback`) that leave something for the next step."""


EngineType = Literal["ar", "generation"]
Int8Weights = Literal["int8", "auto"]

_KEY = "omni"


@dataclass(frozen=True)
class OmniEngineSettings:
    """Part of vLLM's `additional_config`, which reaches every worker.

    Attributes:
        engine_type: `ar` samples tokens; `generation` makes everything in one step, without KV cache.
        engine_output_type: `text`: only tokens leave the engine, and no rows are captured. Any other word names the
            rows that the model emits besides, e.g. `latent`, `codes`, `audio`.
        model_stage: The stage's name, for messages.
        uses_generation_config: The checkpoint's `generation_config.json` is about this stage's tokens.
        row_cache_bytes: For the rows of tokens in the prefix cache, at most.
        int8_weights: On a CPU, of the linear layers; `auto`: unless the model cannot have them.
    """

    engine_type: EngineType = "ar"
    engine_output_type: str = "text"
    model_stage: str = ""
    uses_generation_config: bool = True
    row_cache_bytes: int = ROW_CACHE_BYTES
    int8_weights: Int8Weights | None = None

    @property
    def emits_rows(self) -> bool:
        """Whether outputs of the model leave the engine besides tokens."""
        return self.engine_type == "ar" and self.engine_output_type != "text"

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig | EngineArgs) -> "OmniEngineSettings":
        additional = cast(dict[str, Any], vllm_config.additional_config)
        return cls(**additional.get(_KEY, {}))


class V1RunnerConfig(VllmConfig):
    """A stage's, for one of our model runners, which extend vLLM's V1 model runner."""

    @property
    def use_v2_model_runner(self) -> bool:
        return False


class V2RunnerConfig(VllmConfig):
    """A stage's, for vLLM's V2 model runner."""

    @property
    def use_v2_model_runner(self) -> bool:
        return True


class StageEngineArgs(EngineArgs):
    """vLLM's, with our scheduler for what vLLM decides about asynchronous scheduling, and the stage's model runner."""

    def create_model_config(self) -> ModelConfig:
        config = super().create_model_config()
        settings = OmniEngineSettings.from_vllm_config(self)
        if settings.emits_rows and self.async_scheduling is not False:
            from vllm.model_executor.model_loader import get_model_cls  # takes a second

            self._follow_model(get_model_cls(config))
        return config

    def _follow_model(self, model: type) -> None:
        """Turns asynchronous scheduling off for a model whose next step needs more of a step than its token, which the
        runner has on the device."""
        if not any(hasattr(model, name) for name in _HOOKS_BETWEEN_STEPS):
            return
        if self.async_scheduling:
            raise StageConfigError(f"async_scheduling: the next step of {model.__name__} needs the last one; remove it")
        self.async_scheduling = False

    def create_engine_config(self, *args: Any, **kwargs: Any) -> VllmConfig:
        # Until its configuration is made, a stage has the V1 model runner, also for what vLLM refuses.
        with _runner_in_environment("0"):
            config = super().create_engine_config(*args, **kwargs)
        _check_block_size(config)
        is_async = config.scheduler_config.async_scheduling and self.scheduler_cls == _SCHEDULERS["ar"]
        if is_async:
            config.scheduler_config.scheduler_cls = _ASYNC_SCHEDULER
        # vLLM's function builds its own class, which reads the environment for it, and has no argument.
        config.__class__ = V2RunnerConfig if is_async and _can_use_v2_runner(config) else V1RunnerConfig
        if config.watermark_config is not None and not config.use_v2_model_runner:
            raise StageConfigError(
                "watermark_config: only vLLM's V2 model runner marks text, and this stage cannot have it; remove it"
            )
        return config


def _check_block_size(config: VllmConfig) -> None:
    """Refuses a block size that the attention on a CPU would refuse when the weights have been loaded; before that,
    vLLM only warns."""
    cache, model = config.cache_config, config.model_config
    if not (current_platform.is_cpu() and cache.user_specified_block_size) or model.use_mla:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if not CPUAttentionBackend.supports_block_size(cache.block_size):
        sizes = [getattr(size, "base", size) for size in CPUAttentionBackend.get_supported_kernel_block_sizes()]
        takes = " or ".join(map(str, sizes))
        raise StageConfigError(f"block_size: {cache.block_size} must be a multiple of {takes} on a CPU")


def _can_use_v2_runner(config: VllmConfig) -> bool:
    """Whether V2 is chosen, or text is marked, for which vLLM takes it; and the stage needs nothing that only our model
    runners have.

    Models of installed packages may have hooks, and custom logits processors are written for the V1 model runner.
    """
    if not _is_v2_chosen(config.watermark_config):
        return False
    with _runner_in_environment(None):
        would_take = config.use_v2_model_runner
    return (
        would_take
        and not OmniEngineSettings.from_vllm_config(config).emits_rows
        and config.parallel_config.world_size == 1
        and config.speculative_config is None
        and not config.model_config.logits_processors
        and find_models().architectures.keys().isdisjoint(config.model_config.architectures)
    )


def _is_v2_chosen(watermark_config: Any) -> bool:
    """V1 does not mark text, so vLLM takes V2 for that whatever is chosen."""
    chosen = envs.VLLM_USE_V2_MODEL_RUNNER
    return watermark_config is not None or ("v2_model_runner" in PASSED_ON_GPU if chosen is None else chosen)


@contextmanager
def _runner_in_environment(value: str | None) -> Iterator[None]:
    """Has vLLM read this choice of a model runner; None: it chooses itself."""
    before = os.environ.pop(_V2_RUNNER_VARIABLE, None)
    if value is not None:
        os.environ[_V2_RUNNER_VARIABLE] = value
    try:
        yield
    finally:
        os.environ.pop(_V2_RUNNER_VARIABLE, None)
        if before is not None:
            os.environ[_V2_RUNNER_VARIABLE] = before


def create_engine_args(
    model: str,
    *,
    engine_type: str = "ar",
    engine_output_type: str = "text",
    hf_config_name: str | None = None,
    model_arch: str | None = None,
    model_stage: str = "",
    row_cache_bytes: int = ROW_CACHE_BYTES,
    **vllm_engine_args: Any,
) -> EngineArgs:
    """Engine arguments of one stage. The caller's arguments override a stage's defaults.

    Args:
        model: Checkpoint directory or Hugging Face id.
        engine_type: `ar` samples tokens; `generation` makes the whole output in one step.
        engine_output_type: `text`, or the name of the model's rows that leave the engine besides tokens.
        hf_config_name: The part of the checkpoint's configuration that is this stage's, e.g. `talker_config`. It has
            the whole configuration as the dict `omni_parent_config`.
        model_arch: The architecture to run instead of the checkpoint's.
        model_stage: The stage's name, for messages.
        row_cache_bytes: Memory of the host for the rows of tokens in the prefix cache, at most.
        vllm_engine_args: Any of vLLM's `EngineArgs`.

    Raises:
        StageConfigError: An argument is unknown, has a value of the wrong type or out of range, or cannot be combined
            with this kind of stage.
    """
    _refuse_unknown(vllm_engine_args)
    check_values(vllm_engine_args)
    _check_own_values(
        engine_output_type=engine_output_type,
        hf_config_name=hf_config_name,
        model_arch=model_arch,
        row_cache_bytes=row_cache_bytes,
    )
    int8_weights = _take_int8(vllm_engine_args)
    settings = OmniEngineSettings(
        engine_type=_as_engine_type(engine_type),
        engine_output_type=engine_output_type,
        model_stage=model_stage,
        uses_generation_config=hf_config_name is None and engine_type == "ar" and not _samples_codes(vllm_engine_args),
        row_cache_bytes=row_cache_bytes,
        int8_weights=int8_weights,
    )
    _refuse_unsupported(vllm_engine_args, settings)
    _turn_off_prefix_caching(vllm_engine_args, settings)
    override = StageConfigOverride(
        hf_config_name, model_arch, engine_type == "generation", vllm_engine_args.pop("hf_overrides", None)
    )
    arguments = (
        _defaults(settings) | {"async_scheduling": _schedules_async(vllm_engine_args, settings)} | vllm_engine_args
    )
    if arguments.get("skip_tokenizer_init"):
        for name in _READ_WITH_TOKENIZER:  # They are meant for the stages that write text.
            arguments.pop(name, None)
    if _world_size(arguments) == 1:
        arguments.setdefault("distributed_executor_backend", _UNIPROC_EXECUTOR)
    if arguments.get("otlp_traces_endpoint"):
        arguments["disable_log_stats"] = False  # vLLM makes its spans of these statistics, and fails without them.
    for name, config_class in _CONFIGS.items():
        if isinstance(arguments.get(name), dict):
            arguments[name] = config_class(**arguments[name])
    arguments["additional_config"] = vllm_engine_args.get("additional_config", {}) | {_KEY: asdict(settings)}
    return StageEngineArgs(model=model, hf_overrides=override, **arguments)


class _OwnValues(msgspec.Struct):
    """The types of our own arguments."""

    engine_output_type: str
    hf_config_name: str | None
    model_arch: str | None
    row_cache_bytes: NotNegative


def _check_own_values(**values: Any) -> None:
    try:
        convert(values, _OwnValues)
    except msgspec.ValidationError as error:
        problem, name = split_error(error)
        raise StageConfigError(f"{name}: {problem}{given_value(error, values)}") from error


def _samples_codes(arguments: dict[str, Any]) -> bool:
    """Whether the arguments say that neither tokenizer nor generation config is about the tokens that are sampled."""
    return bool(arguments.get("skip_tokenizer_init")) and arguments.get("generation_config") == "vllm"


def _schedules_async(arguments: dict[str, Any], settings: OmniEngineSettings) -> bool | None:
    """Whether a stage is scheduled asynchronously by default. None: vLLM decides, and does so for accelerators.

    That is for texts, where it has passed on a GPU with this vLLM; V2 has no other schedule for them. Stages that draw
    something else may have guidance, which needs each token before the next step. Errors of workers in other processes,
    and of drafts, would come too late.
    """
    is_text = settings.engine_type == "ar" and settings.uses_generation_config
    is_plain = _world_size(arguments) == 1 and not arguments.get("speculative_config")
    if settings.emits_rows:
        has_passed = "async_rows" in PASSED_ON_GPU
    else:
        has_passed = "async_text" in PASSED_ON_GPU or _is_v2_chosen(arguments.get("watermark_config"))
    return None if is_text and is_plain and has_passed and "scheduler_cls" not in arguments else False


def _as_engine_type(name: str) -> EngineType:
    if name not in get_args(EngineType):
        raise StageConfigError(f"engine_type {name!r} is not one of {', '.join(get_args(EngineType))}")
    return cast(EngineType, name)


def _defaults(settings: OmniEngineSettings) -> dict[str, Any]:
    is_cpu = current_platform.is_cpu()
    defaults: dict[str, Any] = {
        "worker_cls": _WORKERS[settings.engine_type, is_cpu],
        "scheduler_cls": _SCHEDULERS[settings.engine_type],
        "disable_log_stats": True,
        "use_tqdm_on_load": sys.stderr.isatty() and not is_quiet(),
        "ec_manager_config": {"encoder_cache_manager_cls": _ENCODER_CACHE},
    }
    if is_cpu:
        defaults |= {"kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        if settings.emits_rows:
            defaults |= {"enforce_eager": True}
    if not settings.uses_generation_config:
        # A checkpoint's tokenizer and generation defaults are for its language model.
        defaults |= {"skip_tokenizer_init": True, "generation_config": "vllm"}
    if settings.emits_rows or settings.engine_type == "generation":
        defaults |= {"enable_prefix_caching": False}  # A model whose rows depend on its tokens only turns it on.
    if settings.engine_type == "generation":
        # Without chunked prefill vLLM makes max_num_batched_tokens at least max_model_len.
        defaults |= {"enable_chunked_prefill": False, "enforce_eager": True}
    return defaults


def _world_size(arguments: dict[str, Any]) -> int:
    return arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)


def _refuse_unknown(arguments: dict[str, Any]) -> None:
    known = [field.name for field in fields(EngineArgs)]
    for name in arguments:
        if name not in known:
            hint = "; it belongs to default_sampling_params" if name in SamplingParams.__struct_fields__ else ""
            raise StageConfigError(f"unknown engine argument {name!r}{hint or nearest(name, known)}")


def _take_int8(arguments: dict[str, Any]) -> Int8Weights | None:
    """Removes a quantization of ours from the arguments of vLLM, which has none of its name, and returns it."""
    quantization = arguments.get("quantization")
    if quantization not in (INT8, INT8_AUTO):
        return None
    del arguments["quantization"]
    if quantization == INT8:
        _check_int8(arguments)
        return "int8"
    return "auto" if current_platform.is_cpu() and HAS_INT8_PRODUCTS and arguments.get("enforce_eager") else None


def _check_int8(arguments: dict[str, Any]) -> None:
    if not current_platform.is_cpu():
        raise StageConfigError(f"quantization: {INT8} is computed on a CPU; on a GPU vLLM has fp8 for its checkpoints")
    if not arguments.get("enforce_eager"):
        raise StageConfigError(f"quantization: {INT8} is not compiled; set enforce_eager: true in addition")


def _refuse_unsupported(arguments: dict[str, Any], settings: OmniEngineSettings) -> None:
    if arguments.get("async_scheduling") and settings.engine_type != "ar":
        raise StageConfigError(
            "async_scheduling: only autoregressive stages can be scheduled asynchronously; remove it"
        )
    if arguments.get("weight_transfer_config") is not None:
        raise StageConfigError(
            "weight_transfer_config: new weights come from folders, not over NCCL or CUDA IPC (docs/operation.md); "
            "remove it"
        )
    if not settings.emits_rows:
        return
    for name, reason in _ONLY_WITHOUT_ROWS.items():
        if arguments.get(name):
            raise StageConfigError(
                f"{name} needs engine_output_type 'text', not {settings.engine_output_type!r}: {reason}"
            )


def _turn_off_prefix_caching(arguments: dict[str, Any], settings: OmniEngineSettings) -> None:
    """Turns it off where it cannot be on, with a warning: the argument may have been meant for another stage."""
    if arguments.get("enable_prefix_caching") and settings.engine_type != "ar":
        arguments["enable_prefix_caching"] = False
        reason = "it keeps no keys and values"
        logger.warning_once("stage %s runs without enable_prefix_caching: %s", settings.model_stage, reason)


def message_of(error: Exception) -> str:
    """The message of an error of vLLM's; of one of pydantic's, the first problem, its key and value, in one line."""
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    first = error.errors(include_url=False, include_context=False)[0]
    where = "".join(f"{key}: " for key in first["loc"])
    given = f", not {first['input']!r:.100}" if isinstance(first["input"], (str, int, float)) else ""
    return where + first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ") + given


_environment_lock = threading.Lock()


def create_config_without_engine(engine_args: EngineArgs) -> VllmConfig:
    """The configuration of a stage's engine, for a process that does not run it.

    vLLM sets environment variables for the engine meanwhile, such as `LD_PRELOAD`; they do not stay.

    Raises:
        ValueError: vLLM refuses the model or an argument.
    """
    with _environment_lock:
        before = dict(os.environ)
        try:
            return engine_args.create_engine_config(USAGE_CONTEXT)
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def create_config_for_inputs(engine_args: EngineArgs) -> VllmConfig:
    """Makes a configuration for processing inputs: no engine can run with it.

    Raises:
        StageConfigError: vLLM refuses the model or an argument; names the model's class, which may not be importable.
    """
    try:
        config = create_config_without_engine(engine_args)
    except Exception as error:  # Of any type: vLLM computes with values before it checks them.
        settings = OmniEngineSettings.from_vllm_config(engine_args)
        path = find_models().architectures.get(cast(StageConfigOverride, engine_args.hf_overrides).model_arch or "")
        model = "" if path is None else f" (its model is {path})"
        raise StageConfigError(f"stage {settings.model_stage}{model}: {message_of(error)}") from error
    # Several of such processes may feed an engine, each with a cache of its own of preprocessed media: vLLM then sends
    # an item itself, not a reference to what the engine's half of the cache has.
    config.parallel_config._api_process_count = 2
    return config
