# SPDX-License-Identifier: Apache-2.0
"""Names that are elsewhere in another version, and flags that another does not have."""

from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG
from vllm.renderers.chat_utils import MM_PARSER_MAP

__all__ = ["MM_PARSER_MAP", "UNSUPPORTED_FLAGS", "VLLM_SUBCMD_PARSER_EPILOG"]

UNSUPPORTED_FLAGS: dict[str, str] = {}
"""Further flags of `vllm serve` that do not apply to a pipeline, with the reason; see `entrypoints/cli`."""
