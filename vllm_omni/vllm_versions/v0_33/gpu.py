# SPDX-License-Identifier: Apache-2.0
"""What has passed on a GPU with this version of vLLM, as the table of `docs/devices.md` says."""

__all__ = ["PASSED_ON_GPU"]

PASSED_ON_GPU: frozenset[str] = frozenset()
"""On by default on a GPU, of `async_text`, `async_rows` and `v2_model_runner`; see `engine/engine_args.py`."""
