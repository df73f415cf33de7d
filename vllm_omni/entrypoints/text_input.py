# SPDX-License-Identifier: Apache-2.0
"""The text of a request that arrives in pieces, while the stages work on those before."""

import threading
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping

from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs import OmniPrompt, StageInput
from vllm_omni.model_executor.prompt_processor import PromptProcessor, PromptStream

Work = Callable[[], StageInput | None]


class TextInput:
    """
    Attributes:
        stage_id: The stage that reads the text.
        first: Its prompt. Valid after `begin`, as the other attributes.
        is_complete: `first` has the whole text.
    """

    stage_id: int
    first: StageInput
    is_complete: bool

    def __init__(
        self,
        prompt_processors: Mapping[int, PromptProcessor],
        lock: threading.Lock,
        prompt: OmniPrompt,
        text: AsyncIterable[str],
        request_id: str | None,
        run: Callable[[Work], Awaitable[StageInput | None]],
    ) -> None:
        """
        Args:
            prompt_processors, lock: Those of the `RequestBuilder`.
            request_id: The caller's, for errors.
            run: Calls a function in another thread.
        """
        self._prompt_processors = prompt_processors
        self._lock = lock
        self._prompt = prompt
        self._pieces = aiter(text)
        self._request_id = request_id or ""
        self._run = run
        self._stream: PromptStream

    async def begin(self) -> None:
        """Waits for as much text as the first stage's prompt needs.

        Raises:
            InvalidRequestError: The prompt is wrong, or the model reads texts whole.
            Exception: What the iterator raises.
        """
        await self._call(self._open)
        self.first, self.is_complete = await self._next()

    async def feed(self, send: Callable[[int, StageInput, bool], None]) -> None:
        """Sends the rest: the stage, its input, and whether it is the last. Raises as `begin`."""
        is_last = self.is_complete
        while not is_last:
            stage_input, is_last = await self._next()
            send(self.stage_id, stage_input, is_last)

    def _open(self) -> None:
        if len(self._prompt_processors) != 1:
            raise ValueError("this model reads a text whole: prompt must be a string")
        ((self.stage_id, processor),) = self._prompt_processors.items()
        self._stream = processor.stream(self._prompt)

    async def _next(self) -> tuple[StageInput, bool]:
        async for piece in self._pieces:
            made = await self._call(lambda piece=piece: self._stream.add(piece, is_last=False))  # type: ignore[misc]
            if made is not None:
                return made, False
        made = await self._call(lambda: self._stream.add("", is_last=True))
        assert made is not None, "the end of a text is an input"
        return made, True

    async def _call(self, work: Work) -> StageInput | None:
        def locked() -> StageInput | None:
            with self._lock:
                return work()

        try:
            return await self._run(locked)
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(str(error), self._request_id) from error
