# SPDX-License-Identifier: Apache-2.0
"""Names that are elsewhere in another version, and flags that another does not have."""

from vllm.entrypoints.common.startup import VLLM_SUBCMD_PARSER_EPILOG
from vllm.renderers.chat_utils.chat_message import MM_PARSER_MAP

__all__ = ["MM_PARSER_MAP", "UNSUPPORTED_FLAGS", "VLLM_SUBCMD_PARSER_EPILOG"]

UNSUPPORTED_FLAGS = {
    "sleep_mode_backend": "the server does not expose single engines; leave it out",
    "watchdog_config": "a stage that hangs is restarted; set runtime.step_timeout_s in the stage configuration",
}
"""Further flags of `vllm serve` that do not apply to a pipeline, with the reason; see `entrypoints/cli`."""
