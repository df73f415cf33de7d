# SPDX-License-Identifier: Apache-2.0
"""Flags of `vllm serve` that do not apply to a pipeline, and what to use instead.

vLLM's flags configure one engine and its frontend process. A flag that would be ignored is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_omni.vllm_versions import UNSUPPORTED_FLAGS

_REASONS = {
    "one server feeds the pipeline; for several, start each on other devices, behind a load balancer": """
        api_server_count aggregate_engine_logging headless data_parallel_size data_parallel_rank
        data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
        data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
        data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
        dp_supervisor_probe_failure_threshold dp_sync_interval disable_nccl_for_dp_synchronization enable_elastic_ep
        elastic_ep_max_dp_size""",
    "all stages run on this machine; set devices with --stage.NAME.runtime.devices": """
        nnodes node_rank master_addr master_port""",
    "the server supports HTTP only; leave it out": "grpc grpc_port",
    "stages generate, they do not pool; serve such a model with vllm serve, without --omni": """
        runner convert pooler_config io_processor_plugin enable_flash_late_interaction""",
    "use --max-queued: the number of requests that may wait for the whole pipeline": """
        max_num_queued_reqs max_num_queued_tokens""",
    "a stage that dies is restarted; set runtime.restart in the stage configuration": """
        enable_fault_tolerance fault_tolerance_config""",
    "the cache of preprocessed media is in the server's process; leave it out": """
        mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc""",
    "the server does not expose single engines; leave it out": "tokens_only",
    "weights come from folders, not over NCCL or CUDA IPC (docs/operation.md); leave it out": "weight_transfer_config",
    "engines report through the pipeline's own metrics (docs/observability.md); leave it out": """
        enable_logging_iteration_details kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics
        show_hidden_metrics_for_version per_request_spec_decode_metrics""",
    "set runtime.ar in the stage configuration: how often a stage sends text": "stream_interval",
}
_REASON_BY_NAME = {name: reason for reason, names in _REASONS.items() for name in names.split()} | UNSUPPORTED_FLAGS
NAMES = frozenset(_REASON_BY_NAME)

# Values that a pipeline has anyway. Default: the default of vLLM's flag.
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "api_server_count": (None, 1),
    "runner": ("auto", "generate"),
    "data_parallel_size_local": (None, 1),
}


def find_unsupported(explicit: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The unsupported flags among `explicit` by name, each with the reason and the remedy."""
    for name, value in explicit.items():
        if name in NAMES and value not in _ALLOWED_VALUES.get(name, (defaults[name],)):
            yield name, _REASON_BY_NAME[name]
