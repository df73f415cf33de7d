# SPDX-License-Identifier: Apache-2.0
"""The public methods of vLLM's `LLM` and `AsyncLLM` that a pipeline does not have: what to use, or what they need.

`tests/entrypoints/test_vllm_methods.py` compares them with vLLM's classes, and with `docs/vllm_surface.md`.
"""

_POOLING = "needs a model that pools; a pipeline's stages generate"
_ONE_ENGINE = "needs one engine; a pipeline has one in each stage"
_TRAINER = "needs a connection to a trainer; weights come from folders"
_DRAFTS = "needs draft models of their own; those of a stage are part of its checkpoint"
_ADAPTERS = "needs one engine; each stage keeps the adapters that requests have named last"

OF_LLM: dict[str, str] = {
    "beam_search": "use `use_beam_search` of a server's `/v1/completions`",
    **dict.fromkeys(("classify", "embed", "encode", "score"), _POOLING),
    "release_kv_cache_memory": _ONE_ENGINE,
    "shutdown_weight_transfer_engine": _TRAINER,
    "start_draft_weight_update": _DRAFTS,
}
OF_ASYNC_LLM: dict[str, str] = {
    "add_request": "use `generate`",
    **dict.fromkeys(("is_running", "is_stopped", "errored"), "use `is_open`"),
    "dead_error": "use `error`",
    "check_health": "use `health()`",
    "check_admission": "use `check_room()`",
    **dict.fromkeys(("get_num_unfinished_requests", "get_num_queued_tokens"), "use `stats()`"),
    "do_log_stats": "use `log_stats=True`",
    "wait_for_requests_to_drain": 'use `pause_generation(mode="wait")`',
    "tokenizer": "use `get_tokenizer()`",
    **dict.fromkeys(("get_supported_tasks", "is_tracing_enabled"), "use `config`"),
    **dict.fromkeys(("shutdown", "should_keep_api_server_alive"), "use `close()`"),
    "from_vllm_config": "use `from_engine_args`",
    "compute_weight_checksums": "needs one model; `get_weight_version()` has the version of all stages",
    "encode": _POOLING,
    **dict.fromkeys(("list_loras", "pin_lora", "remove_lora"), _ADAPTERS),
    **dict.fromkeys(
        (
            "release_kv_cache_memory", "checkpoint_prepare", "checkpoint_restore", "get_kv_event_sources",
            "get_status", "handle_fault", "notify_kv_transfer_request_rejected", "scale_elastic_ep",
            "get_external_elastic_ep_status",
        ),
        _ONE_ENGINE,
    ),
    "shutdown_weight_transfer_engine": _TRAINER,
    "start_draft_weight_update": _DRAFTS,
}  # fmt: skip
