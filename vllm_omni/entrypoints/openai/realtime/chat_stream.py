# SPDX-License-Identifier: Apache-2.0
"""A request for the chat handler, its prompt, and its answer as deltas while they are made.

The prompt is rendered with all items of the conversation. If it is too long the oldest turns leave it, until it fits
(OpenAI's `truncation`). The model's own renderer counts; nothing is estimated.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError

from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.realtime.audio import Sound
from vllm_omni.entrypoints.openai.realtime.config import PromptLimits, Values, voice_name
from vllm_omni.entrypoints.openai.realtime.conversation import (
    Item,
    Message,
    Picture,
    is_call_output,
    is_turn_start,
    to_messages,
    without_outputs_of,
)
from vllm_omni.entrypoints.openai.realtime.output_items import SessionContext
from vllm_omni.entrypoints.openai.realtime.protocol import EventError
from vllm_omni.entrypoints.openai.request_context import RequestContext, TooMuchMediaError
from vllm_omni.entrypoints.openai.sse import ErrorLine
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni.errors import OmniError
from vllm_omni.vllm_protocol import ErrorResponse

logger = logging.getLogger("vllm.omni.server")

Render = Callable[[OmniChatCompletionRequest], Awaitable[Any]]

_TOO_LONG = ("input_tokens", "input_text")
"""What vLLM's errors about the length of a prompt name."""

USAGE = {"include_usage": True, "continuous_usage_stats": True}
"""With every chunk, because an answer may be cut at any."""


def make_request(settings: Values, messages: Sequence[Message]) -> OmniChatCompletionRequest:
    """The request of a response.

    Args:
        settings: The configuration of the response.
        messages: Those of the conversation.

    Raises:
        EventError: They make no request.
    """
    speaks = settings["output_modalities"] == ["audio"]
    limit = settings["max_output_tokens"]
    fields: dict[str, Any] = {
        "model": settings["model"],
        "messages": messages,
        "modalities": ["text", "audio"] if speaks else ["text"],
        "stream": True,
        "stream_options": USAGE,
        "max_completion_tokens": None if limit == "inf" else limit,
    }
    if speaks:
        fields["audio"] = {"format": "pcm16", "voice": voice_name(settings["audio"]["output"]["voice"])}
    if settings["tools"]:
        fields["tools"] = [_tool(tool) for tool in settings["tools"]]
        fields["tool_choice"] = _tool_choice(settings["tool_choice"])
        fields["parallel_tool_calls"] = settings["parallel_tool_calls"]
    try:
        return OmniChatCompletionRequest.model_validate(fields)
    except (VLLMClientError, ValueError) as error:
        raise EventError(f"the response cannot be made: {error}", "response") from error


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}


@dataclass(frozen=True)
class _Attempt:
    """A prompt of the newest items.

    Attributes:
        num_tokens: Infinite if the renderer refuses it as too long.
        result: The renderer's.
        error: Its refusal.
    """

    request: OmniChatCompletionRequest
    num_tokens: float
    result: Any = None
    error: VLLMValidationError | None = None


class PromptWindow:
    """Makes the prompt of one response. See `RequestContext.fit_prompt`.

    A sound or an image that the model's processor has kept is not decoded again, see `RequestContext.is_preprocessed`.
    """

    def __init__(
        self,
        settings: Values,
        items: Sequence[Item],
        limits: PromptLimits,
        *,
        lasts: bool,
        is_speculative: bool = False,
    ) -> None:
        """
        Args:
            settings: The configuration of the response; if its truncation is `disabled` all is read.
            items: What the response may read, the oldest first.
            lasts: Whether what has left the prompt is not in later ones either, which then begin as this one does.
            is_speculative: Whether this takes effect only by `promote`.
        """
        self._settings, self._items, self._limits, self._lasts = settings, items, limits, lasts
        self._is_speculative, self._left = is_speculative, items[:0]
        truncation = settings["truncation"]
        self._truncates = truncation != "disabled"
        options = truncation if isinstance(truncation, Mapping) else {}
        self._ratio: float = options.get("retention_ratio", 1.0)
        self._max_post_tokens: int | None = (options.get("token_limits") or {}).get("post_instructions")

    async def render(self, request: OmniChatCompletionRequest, render: Render) -> tuple[Any, Any] | ErrorResponse:
        """What `render` returns of a prompt that fits; the request then has its messages.

        Raises:
            VLLMValidationError: The newest item is too long alone.
        """

        async def attempt(messages: list[Message]) -> _Attempt:
            fields = {"model": request.model, "messages": messages}
            checked = OmniChatCompletionRequest.model_validate(fields).messages
            return await _attempt(request.model_copy(update={"messages": checked}), render)

        async def instructions() -> float:
            return (await attempt([*self._messages(None), {"role": "user", "content": ""}])).num_tokens

        starts = self._starts() if self._truncates else [0]
        limit: float = self._limits.max_input_tokens(self._settings["max_output_tokens"])
        if self._max_post_tokens is not None:
            limit = min(limit, await instructions() + self._max_post_tokens)
        chosen, tried = 0, await attempt(self._messages(starts[0]))
        if tried.num_tokens > limit and len(starts) > 1:
            if self._ratio < 1.0:
                num_tokens = min(await instructions(), limit)
                limit = num_tokens + self._ratio * (limit - num_tokens)
            chosen, tried = await self._search(starts, limit, attempt)
        if tried.error is not None:
            raise tried.error
        vars(request).update(vars(tried.request))  # Tools' parsers have set fields, too.
        self._left = self._items[: starts[chosen]]
        self._mark_left()
        return tried.result

    def promote(self) -> None:
        """Has what has left, or will leave, its prompt be out of later ones."""
        self._is_speculative = False
        self._mark_left()

    def _mark_left(self) -> None:
        if self._lasts and not self._is_speculative:
            for item in self._left:
                item.is_read = False

    async def _search(
        self, starts: Sequence[int], limit: float, attempt: Callable[[list[Message]], Awaitable[_Attempt]]
    ) -> tuple[int, _Attempt]:
        """The first of the starts, after that at 0, whose prompt has so many tokens, or the last one."""
        low, high, step = 0, 0, 1
        while not high:
            new = min(low + step, len(starts) - 1)
            tried = await attempt(self._messages(starts[new]))
            if tried.num_tokens <= limit or new == len(starts) - 1:
                high, best = new, tried
            else:
                low, step = new, 2 * step
        while high - low > 1:
            new = (low + high) // 2
            tried = await attempt(self._messages(starts[new]))
            if tried.num_tokens <= limit:
                high, best = new, tried
            else:
                low = new
        return high, best

    def _starts(self) -> list[int]:
        """Where the prompt may begin: at each turn, and in the last one at each item but the results of calls. Only
        where there are not more media than the model reads."""
        turns = [i for i, item in enumerate(self._items) if i == 0 or is_turn_start(item)] or [0]
        within = [i for i in range(turns[-1] + 1, len(self._items)) if not is_call_output(self._items[i])]
        starts = [*turns, *within]
        allowed = [start for start in starts if self._reads_media(self._items[start:])]
        return allowed or starts[-1:]

    def _reads_media(self, items: Sequence[Item]) -> bool:
        num_parts: Counter[str] = Counter()
        for item in items:
            num_parts["audio"] += sum(sound.text is None for sound in item.sounds.values())
            num_parts["image"] += len(item.images)
        return all(num <= self._limits.max_parts.get(kind, num) for kind, num in num_parts.items())

    def _messages(self, start: int | None) -> list[Message]:
        """The instructions, and the items from one on; None: no items."""
        instructions = self._settings["instructions"]
        if start is None:
            return to_messages(instructions, [])
        return to_messages(instructions, without_outputs_of(self._items[:start], self._items[start:]))


async def _attempt(request: OmniChatCompletionRequest, render: Render) -> _Attempt:
    try:
        result = await _render(request, render)
    except VLLMValidationError as error:
        if error.parameter not in _TOO_LONG and not isinstance(error, TooMuchMediaError):
            raise
        return _Attempt(request, math.inf, error=error)
    num_tokens = (
        0
        if isinstance(result, ErrorResponse)
        else sum(len(prompt.get("prompt_token_ids") or ()) for prompt in result[1])
    )
    return _Attempt(request, num_tokens, result)


async def _render(request: OmniChatCompletionRequest, render: Render) -> Any:
    context = RequestContext.current()
    context.restart_media()
    try:
        return await render(request)
    except VLLMClientError:
        raise
    except ValueError:
        # The processor may have dropped what it had kept of a sound or an image, which was not decoded. Now all are.
        is_preprocessed, context.is_preprocessed = context.is_preprocessed, lambda address: False
        try:
            return await render(request)
        finally:
            context.is_preprocessed = is_preprocessed


async def deltas_of(
    session: SessionContext,
    request: OmniChatCompletionRequest,
    media: Iterable[Sound | Picture],
    fit_prompt: Any = None,
) -> AsyncGenerator[ChatDelta, None]:
    """The deltas of a streamed answer. Closing the generator aborts the request.

    Run it in a task of its own: the request's context is the task's.

    Args:
        media: Those whose addresses its messages have.
        fit_prompt: See `RequestContext`.

    Raises:
        EventError: The request was refused, or failed.
    """
    context = RequestContext.start(session.client)
    kept = {each.address: each for each in media}
    context.kept_sounds = {address: each.decoded for address, each in kept.items() if isinstance(each, Sound)}
    context.kept_files = {address: each.source for address, each in kept.items() if isinstance(each, Picture)}
    if fit_prompt is not None and (cache := session.chat.client.renderer.mm_processor_cache) is not None:
        context.is_preprocessed = lambda address: address in kept and cache.is_cached_item(address)
    context.fit_prompt = fit_prompt
    try:
        answer = await session.chat.create_deltas(request)
        if isinstance(answer, ErrorResponse):
            raise _failure(answer.error.message, answer.error.code, answer.error.param)
        await context.started()
        async with aclosing(answer):
            async for delta in answer:
                yield delta
    except Exception as error:
        raise as_event_error(error) from error
    finally:
        await context.abort()


def as_event_error(error: Exception, param: str | None = None) -> EventError:
    """An error as the client is told; an internal one goes to the log.

    Args:
        param: The field of the event, where it is not that of the error.
    """
    if isinstance(error, EventError):
        return error
    if isinstance(error, ErrorLine):
        line = error.args[0]["error"]
        return _failure(line["message"], line["code"], param or line.get("param"))
    if isinstance(error, OmniError):
        error = to_http_error(error)
    if isinstance(error, GracefulHTTPError):
        return _failure(str(error), error.http_status.value, param)
    if isinstance(error, (VLLMClientError, ValueError)):
        message = str(error.args[0] if error.args else error)
        return _failure(message, 400, param or getattr(error, "parameter", None))
    logger.error("a realtime response failed", exc_info=error)
    return _failure("internal error; see the server's log", 500, param)


def _failure(message: str, status: Any, param: str | None) -> EventError:
    code = str(status)
    return EventError(message, param, code, "server_error" if code.startswith("5") else "invalid_request_error")
