# SPDX-License-Identifier: Apache-2.0
"""How much device memory a stage needs, computed from its checkpoint's configuration before anything is loaded.

The stage's model is built on the meta device: its parameters have shapes and dtypes, but no memory. Weights and KV
cache are exact; activations are estimates (see `_activations`). No GPU is needed, nothing is measured.
"""

import logging
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.loader import input_processor_class
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.engine.engine_args import (
    INT8_AUTO,
    EngineType,
    create_config_without_engine,
    create_engine_args,
)
from vllm_omni.errors import StageConfigError
from vllm_omni.model_executor.feedback import SupportsFeedback
from vllm_omni.model_executor.interfaces import SupportsActivationEstimate

OVERHEAD_BYTES = 512 << 20
"""CUDA graphs and the workspaces of libraries, in a vLLM stage's budget. An assumption."""

CONTEXT_BYTES = 512 << 20
"""CUDA context of each process on a device, outside all budgets. An assumption."""

_POSITIONS_PER_MEDIA_TOKEN = 4  # Encoders merge 2 x 2 patches, or as many audio frames, into one token of the prompt.
_LAYER = re.compile(r".*?\.\d+(?=\.|$)")  # The name of a layer: `model.layers.3`
_QUANTIZED_BYTES = {"fp8": 1, "int8": 1}  # Bytes of a quantized weight, for quantization while loading.


@dataclass(frozen=True)
class StageNeeds:
    """Bytes that a stage needs, on all of its devices together.

    Attributes:
        weights: Bytes of parameters and buffers.
        activations: The peak of one step; None: unknown.
        overhead: `OVERHEAD_BYTES`, and what a model with feedback keeps of its requests.
        kv_token: KV cache of one token of a long request; 0 for a model without KV cache.
        kv_request: KV cache of one request of `max_model_len` tokens, which vLLM requires to start.
        max_model_len: Tokens of the longest request; 0 for a stage without vLLM.
        num_parameters: Of a vLLM stage.
    """

    weights: int
    activations: int | None
    overhead: int = 0
    kv_token: float = 0.0
    kv_request: int = 0
    max_model_len: int = 0
    num_parameters: int = 0

    @property
    def without_kv_cache(self) -> int:
        return self.weights + (self.activations or 0) + self.overhead

    @property
    def total(self) -> int:
        """The minimum with which the stage starts."""
        return self.without_kv_cache + self.kv_request


def stage_needs(config: PipelineConfig, stage: OmniStageConfig, model: str) -> StageNeeds | None:
    """Memory of a stage on an accelerator; None for a stage without a model.

    A stage on several devices is counted as if it ran on one. Reads configurations and other small files, which are
    downloaded for a name on the hub.

    Raises:
        StageConfigError: It cannot be computed; the message says why.
    """
    return stage.kind.memory_needs(config, model)


def diffusers_needs(config: DiTConfig, model: str) -> StageNeeds:
    """The needs of a stage that runs a diffusers pipeline; `model` is its checkpoint."""
    from vllm_omni.diffusion.loader import weight_bytes  # imports diffusers

    # Each device is counted as the first one, which has all of the pipeline, the others only the denoiser.
    weights = weight_bytes(model, config, torch.device("cuda")) * config.world_size
    return StageNeeds(weights=weights, activations=None)


def vllm_needs(config: PipelineConfig, stage: OmniStageConfig, model: str, engine_type: EngineType) -> StageNeeds:
    """The needs of a stage that runs a vLLM engine of this type; `model` is its checkpoint."""
    sizes = stage.kind.parallel_sizes
    arguments = {name: value for name, value in stage.vllm_engine_args.items() if name not in sizes}
    quantization = arguments.pop("quantization", None)
    if quantization not in (None, INT8_AUTO, *_QUANTIZED_BYTES):
        raise StageConfigError(f"weights with quantization {quantization!r} are not computed")
    with _quiet():
        args = create_engine_args(model, engine_type=engine_type, **arguments)
        vllm_config = create_config_without_engine(args)
        module = _build(vllm_config)
    max_rows = vllm_config.scheduler_config.max_num_batched_tokens
    num_rows = _rows_of_a_step(config, stage, vllm_config) if engine_type == "generation" else max_rows
    specs = list(_kv_cache_specs(vllm_config))
    return StageNeeds(
        weights=_weights(module, _QUANTIZED_BYTES.get(quantization)),
        activations=_activations(module, vllm_config, num_rows),
        overhead=OVERHEAD_BYTES + _feedback_bytes(module, vllm_config),
        kv_token=sum(spec.page_size_bytes / spec.block_size for spec in specs),
        kv_request=sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs),
        max_model_len=vllm_config.model_config.max_model_len,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
    )


def _build(vllm_config: VllmConfig) -> nn.Module:
    """The model on the meta device."""
    with (
        set_current_vllm_config(vllm_config),
        _one_rank(),
        set_default_torch_dtype(_dtype(vllm_config)),
        torch.device("meta"),
    ):
        return initialize_model(vllm_config)


def _dtype(vllm_config: VllmConfig) -> torch.dtype:
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # resolved by vLLM
    return dtype


@contextmanager
def _one_rank() -> Iterator[None]:
    """vLLM's layers read the size of their parallel group: makes a group of one member."""
    if torch.distributed.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences vLLM's warnings: they are about this machine, which may not be the target."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _weights(module: nn.Module, quantized_bytes: int | None) -> int:
    """Bytes of parameters and buffers; quantization applies to linear layers and experts."""
    size = sum(buffer.nbytes for buffer in module.buffers())
    counted: set[int] = set()
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            if id(parameter) in counted:  # tied
                continue
            counted.add(id(parameter))
            is_linear = isinstance(layer, LinearBase) and parameter.dim() == 2
            if quantized_bytes is not None and (is_linear or _is_experts(layer, parameter)):
                size += parameter.numel() * quantized_bytes
            else:
                size += parameter.nbytes
    return size


def _is_experts(layer: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether these are the weights of all experts of a layer, `[experts, out, in]`."""
    return parameter.dim() == 3 and not isinstance(layer, nn.Conv1d)


def _feedback_bytes(module: nn.Module, vllm_config: VllmConfig) -> int:
    if not isinstance(module, SupportsFeedback):
        return 0
    with torch.device("meta"):
        return module.make_feedback_strategy(vllm_config.scheduler_config.max_num_seqs).buffer_bytes


def _kv_cache_specs(vllm_config: VllmConfig) -> Iterator[Any]:
    for layer in vllm_config.compilation_config.static_forward_context.values():
        if isinstance(layer, AttentionLayerBase) and not getattr(layer, "kv_sharing_target_layer_name", None):
            spec = layer.get_kv_cache_spec(vllm_config)
            if spec is not None:
                yield spec


# Activations.


def _rows_of_a_step(config: PipelineConfig, stage: OmniStageConfig, vllm_config: VllmConfig) -> int:
    """Maximal input rows of a step of a one-step engine: fewer if all requests come in windows."""
    scheduler = vllm_config.scheduler_config
    if (processor := input_processor_class(stage)) is None:
        return scheduler.max_num_batched_tokens
    windows = [config.window(source, stage.stage_id, processor.window) for source in stage.engine_input_source]
    sizes = [window.window_size for window in windows if window.streams and not window.only_if_streaming]
    if len(sizes) < len(windows):
        return scheduler.max_num_batched_tokens
    return min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max(sizes))


def _activations(module: nn.Module, vllm_config: VllmConfig, num_rows: int) -> int | None:
    """An estimate of the peak of vLLM's profiling run, which the engine reserves.

    A language model: the outputs of all linear layers of its widest layer, for `max_num_batched_tokens` tokens, and
    float32 logits for `max_num_seqs` requests, twice. Encoders: likewise, for one input that fills a prompt of
    `max_model_len` tokens, because the profiling run encodes the largest possible input. The outputs of a layer
    do not all exist at the same time; the difference covers residuals and temporary copies.
    """
    if isinstance(module, SupportsActivationEstimate):
        return module.activation_bytes(num_rows)
    if vllm_config.model_config.is_attention_free:
        return None
    element = _dtype(vllm_config).itemsize
    widths = _layer_widths(module, getattr(vllm_config.model_config.hf_text_config, "num_experts_per_tok", 1))
    encoders = _encoder_names(module, vllm_config)
    language = max((width for name, width in widths.items() if not name.startswith(encoders)), default=0)
    encoder = max((width for name, width in widths.items() if encoders and name.startswith(encoders)), default=0)
    positions = vllm_config.model_config.max_model_len * _POSITIONS_PER_MEDIA_TOKEN
    logits = vllm_config.scheduler_config.max_num_seqs * vllm_config.model_config.get_vocab_size() * 4 * 2
    return max(num_rows * language * element + logits, positions * encoder * element)


def _encoder_names(module: nn.Module, vllm_config: VllmConfig) -> tuple[str, ...]:
    """Name prefixes of the modules that encode media."""
    if not isinstance(module, SupportsMultiModal) or not vllm_config.model_config.is_multimodal_model:
        return ()
    language: Any = module.get_language_model()
    return tuple(f"{name}." for name, child in module.named_children() if child is not language)


def _layer_widths(module: nn.Module, num_experts_per_token: int) -> dict[str, int]:
    """Output values of the linear layers of each layer for one position, by the layer's name."""
    widths: dict[str, int] = defaultdict(int)
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, VocabParallelEmbedding)):
            continue
        group = _LAYER.match(name)
        for parameter in layer.parameters(recurse=False):
            if _is_experts(layer, parameter):
                widths[group[0] if group else name] += num_experts_per_token * parameter.shape[1]
            elif parameter.dim() > 1:
                widths[group[0] if group else name] += parameter.shape[0]
    return widths
