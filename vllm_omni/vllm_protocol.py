# SPDX-License-Identifier: Apache-2.0
"""Bodies of vLLM's API that several modules read or make.

vLLM moves the modules below `vllm.entrypoints` and `vllm.renderers` often, so one module of ours takes each name of
them: `tests/test_vllm_seams.py`.
"""

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse, UsageInfo

__all__ = [
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatMessage",
    "DeltaMessage",
    "ErrorInfo",
    "ErrorResponse",
    "UsageInfo",
]
