# SPDX-License-Identifier: Apache-2.0
"""Starts one engine or pipeline and says so; a fresh process for `start.py`, which holds the clock.

python starter.py plain|omni MODEL [STAGE_CONFIGS.yaml]
"""

import sys
from typing import Any

READY = "ready"
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
}


def main(who: str, *args: str) -> None:
    if who == "plain":
        from vllm import LLM

        LLM(*args, **ENGINE_ARGS)
        print(READY, flush=True)
        return
    from vllm_omni import OmniLLM

    with OmniLLM(*args, **ENGINE_ARGS):
        print(READY, flush=True)


if __name__ == "__main__":  # vLLM's own processes import this file again
    main(*sys.argv[1:])
