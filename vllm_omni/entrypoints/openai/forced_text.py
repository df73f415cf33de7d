# SPDX-License-Identifier: Apache-2.0
"""Forces a model that speaks what it writes to write a given text, and so to speak it.

Of each position only the text's token can be sampled (`engine/grammars.py`). The tokens are those of the tokenizer, as
in training, and not others with the same spelling; control tokens in the text are plain text. The prompt does not
contain the text, so the text cannot act as a prompt.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any, cast

from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike

from vllm_omni.vllm_protocol import ChatCompletionRequest, ErrorResponse

REQUEST = "Read the text aloud, word for word."
"""The user's message in the prompt; the reply is forced."""


class ForcedTextBuilder:
    """Builds requests whose reply is a given text, for one pipeline. For use from the event loop."""

    def __init__(self, renderer: OnlineRenderer, tokenizer: TokenizerLike, max_model_len: int) -> None:
        self._renderer = renderer
        # A copy, because `split_special_tokens` is a state of the tokenizer, and the renderer's must not change.
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._max_model_len = max_model_len

    async def prepare(self, text: str, instructions: str | None = None) -> tuple[EngineInput, SamplingParams]:
        """The prompt of the stage that writes the text, which allows only the text, and its sampling parameters.

        Args:
            instructions: How to speak it: the system message. None: the chat template's own, if it has one.

        Raises:
            VLLMValidationError: It is too long for the model.
        """
        token_ids = await asyncio.to_thread(self._tokenize, text)
        engine_input = await self._render(instructions)
        num_needed = len(cast("list[int]", engine_input.get("prompt_token_ids") or [])) + len(token_ids) + 1
        if num_needed > self._max_model_len:
            raise VLLMValidationError(
                f"the input is too long: with its instructions it is {num_needed} tokens, and the model takes "
                f"{self._max_model_len}; send it in parts",
                parameter="input",
            )
        params = SamplingParams(temperature=0.0, max_tokens=len(token_ids) + 1)  # and the end of the reply
        return cast(EngineInput, {**engine_input, "forced_token_ids": token_ids}), params

    def _tokenize(self, text: str) -> list[int]:
        with self._lock:
            return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    async def _render(self, instructions: str | None) -> EngineInput:
        system = [{"role": "system", "content": instructions}] if instructions else []
        request = ChatCompletionRequest.model_validate({"messages": [*system, {"role": "user", "content": REQUEST}]})
        answer = await self._renderer.render_chat(request)
        if isinstance(answer, ErrorResponse):
            raise VLLMValidationError(answer.error.message, parameter=answer.error.param)
        _, (engine_input,) = answer
        return engine_input
