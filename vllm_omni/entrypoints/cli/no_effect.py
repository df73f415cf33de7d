# SPDX-License-Identifier: Apache-2.0
"""Flags of `vllm serve` that mean nothing to a pipeline, and what to use instead.

vLLM's flags speak of one engine and of the process that feeds it. A flag that would be taken and ignored is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_ONE_SERVER = "one server feeds the pipeline; for several, start each on other devices, behind a load balancer"
_ONE_MACHINE = "all stages run on this machine; devices are given with --stage.NAME.runtime.devices"
_HTTP = "the server speaks HTTP only; leave it out"
_NO_POOLING = "stages generate, they do not pool; serve such a model with vllm serve, without --omni"
_ADMISSION = "use --max-queued: how many requests may wait for the whole pipeline"
_RESTART = "a stage that dies is started again; runtime.restart in the stage configuration says how often"
_MM_CACHE = "media are preprocessed for each request, nothing is kept from one to the next; leave it out"
_INTERNAL = "the server does not expose single engines; leave it out"
_ENGINE_METRICS = "engines report through the pipeline's own metrics (docs/observability.md); leave it out"
_SEGMENTS = "runtime.ar in the stage configuration says how often text is passed on"

_WHY: dict[str, tuple[str, ...]] = {
    _ONE_SERVER: (
        "api_server_count",
        "aggregate_engine_logging",
        "headless",
        "data_parallel_size",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_size_local",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_backend",
        "data_parallel_hybrid_lb",
        "data_parallel_external_lb",
        "data_parallel_multi_port_external_lb",
        "data_parallel_supervisor_port",
        "dp_supervisor_probe_interval_s",
        "dp_supervisor_probe_timeout_s",
        "dp_supervisor_probe_failure_threshold",
        "dp_sync_interval",
        "disable_nccl_for_dp_synchronization",
        "enable_elastic_ep",
        "elastic_ep_max_dp_size",
    ),
    _ONE_MACHINE: ("nnodes", "node_rank", "master_addr", "master_port"),
    _HTTP: ("grpc", "grpc_port"),
    _NO_POOLING: ("runner", "convert", "pooler_config", "io_processor_plugin", "enable_flash_late_interaction"),
    _ADMISSION: ("max_num_queued_reqs", "max_num_queued_tokens"),
    _RESTART: ("enable_fault_tolerance", "fault_tolerance_config"),
    _MM_CACHE: (
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
    ),
    _INTERNAL: (
        "tokens_only",
        "enable_scale_out",
        "weight_transfer_config",
        "enable_sleep_mode",
        "sleep_mode_offload_cudagraph",
        "sleep_preserve_parameter_names",
        "profiler_config",
    ),
    _ENGINE_METRICS: (
        "enable_logging_iteration_details",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "cudagraph_metrics",
        "enable_mfu_metrics",
        "show_hidden_metrics_for_version",
        "per_request_spec_decode_metrics",
        "enable_per_request_metrics",
    ),
    _SEGMENTS: ("stream_interval",),
}
NAMES = frozenset(name for names in _WHY.values() for name in names)

# Values that ask for what is done anyway, where these are not just vLLM's default.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "api_server_count": (None, 1),
    "runner": ("auto", "generate"),
    "mm_processor_cache_gb": (0,),
    "data_parallel_size_local": (None, 1),
}


def find_ignored(explicit: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names among the flags that were given which would be ignored, each with the reason and the remedy."""
    reasons = {name: reason for reason, names in _WHY.items() for name in names}
    for name, value in explicit.items():
        if name in reasons and value not in _HARMLESS.get(name, (defaults[name],)):
            yield name, reasons[name]
