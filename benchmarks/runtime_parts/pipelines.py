# SPDX-License-Identifier: Apache-2.0
"""Configurations of pipelines that `runtime.py` measures, and what asks them."""

import json
from pathlib import Path
from typing import Any

from vllm_omni import OmniLLM
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

OMNI_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,  # small, so that all of it was written to before memory is looked at
}
SHORT_ANSWER: list[Any] = [{"max_tokens": 4}, {"max_tokens": 8, "detokenize": False}, None]
"""Sampling parameters of the three stages of Qwen3-Omni."""
_FUNCTIONS = "runtime_parts.functions"


def open_chain(directory: Path, functions: list[str], **arguments: Any) -> OmniLLM:
    """A pipeline of function stages, each reading the one before; the last one's text reaches the caller."""
    stages = [_stage(stage_id, name) for stage_id, name in enumerate(functions)]
    stages[-1] |= {"final_output": True, "final_output_type": "text"}
    path = directory / f"{'-'.join(functions)}.yaml"
    path.write_text(json.dumps({"stage_args": stages}))  # JSON is YAML
    return OmniLLM("", str(path), **arguments)


def write_qwen3_omni(directory: str | Path) -> Path:
    """Thinker, talker and vocoder with tiny random weights."""
    return write_tiny_checkpoint("qwen3_omni_moe", Path(directory) / "model")


def _stage(stage_id: int, function: str) -> dict[str, Any]:
    return {
        "stage_id": stage_id,
        "engine_type": "function",
        "function": f"{_FUNCTIONS}.{function}",
        "engine_args": {"model_stage": f"{function}{stage_id}"},
        "engine_input_source": [stage_id - 1] if stage_id else [],
    }
