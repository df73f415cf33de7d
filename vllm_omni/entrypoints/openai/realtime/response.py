# SPDX-License-Identifier: Apache-2.0
"""One response of a session: a request to the pipeline, its output items, and their events in OpenAI's order.

A reader takes the deltas as the pipeline makes them; the response sends them, speech not much faster than it is played.

One that is begun when a user pauses, in case the turn has ended, is an ordinary response, whose turn is not in the
conversation and whose events wait. It is promoted if a response to the turn would read exactly the same; else it is
dropped, and the client never knew of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Literal

import numpy as np

from vllm_omni.entrypoints.openai.realtime.audio import Sound
from vllm_omni.entrypoints.openai.realtime.chat_stream import PromptWindow, as_event_error, deltas_of, make_request
from vllm_omni.entrypoints.openai.realtime.config import Values, voice_name
from vllm_omni.entrypoints.openai.realtime.conversation import (
    Conversation,
    Item,
    Picture,
    Speech,
    spoken_length,
    to_messages,
)
from vllm_omni.entrypoints.openai.realtime.output_items import (
    Call,
    Output,
    ResponseWriter,
    SessionContext,
    SpokenMessage,
    WrittenMessage,
)
from vllm_omni.entrypoints.openai.realtime.protocol import EventError, new_id
from vllm_omni.entrypoints.openai.realtime.transcription import write_texts
from vllm_omni.entrypoints.openai.request_context import end
from vllm_omni.entrypoints.openai.streamed_chat import MAX_UNSENT_BYTES, ChatDelta, UnsentQueue
from vllm_omni.errors import PipelineFullError
from vllm_omni.metrics.stats import SpeculationCounts

CancelReason = Literal["client_cancelled", "turn_detected"]

MAX_SPECULATIVE_S = 5.0
"""That an answer waits for the end of its turn: a client may stop sending sound. It then ends."""


class Response:
    """One response; `start` it once.

    Attributes:
        id: Its id.
        is_in_conversation: Whether its items belong to the conversation.
        is_pending: Whether the words of its turn are not known yet, or the turn has not ended; the client does not know
            of it.
        num_written: Tokens of its text that were read so far.
    """

    def __init__(
        self,
        session: SessionContext,
        settings: Values,
        items: Sequence[Item],
        conversation: Conversation | None,
        *,
        metadata: dict[str, str] | None = None,
        turn: Item | None = None,
        lasts: bool = True,
        is_speculative: bool = False,
    ) -> None:
        """
        Args:
            settings: The configuration of the response.
            items: What the model reads.
            conversation: Gets the output items; None: a response that is out of band.
            turn: The user's turn that it answers if the ASR stage finds words in it; None: it has no condition.
            lasts: See `PromptWindow`.
            is_speculative: Whether its turn, the last item, may go on: it is made, at most `MAX_UNSENT_BYTES` of it,
                and has no events before `promote`.

        Raises:
            EventError: They make no request.
        """
        self.id = new_id("resp")
        self.is_in_conversation = conversation is not None
        self.is_pending = turn is not None or is_speculative
        self._is_promoted = asyncio.Event()
        if not is_speculative:
            self._is_promoted.set()
        self._turn, self._session, self._settings = turn, session, settings
        self._window = PromptWindow(settings, items, session.prompt_limits, lasts=lasts, is_speculative=is_speculative)
        self._writer = ResponseWriter(session, self.id, conversation, settings["audio"]["output"])
        self._metadata = metadata
        self._items = list(items)
        self._media: list[Sound | Picture] = []
        for item in items:
            self._media += (*item.sounds.values(), *item.pictures.values())
        self._messages_before = self._messages(items[:-1]) if is_speculative else []
        self._request = make_request(settings, self._messages(items))
        self._status = "in_progress"
        self._details: dict[str, Any] | None = None
        self._cancel_reason: CancelReason | None = None
        self._deltas: UnsentQueue[ChatDelta] = UnsentQueue(lambda delta: delta.num_bytes)
        self._unsent = session.share()
        self._error: EventError | None = None
        self._outputs: list[Output] = []
        self._message: SpokenMessage | WrittenMessage | None = None
        self._calls: dict[int, Call] = {}
        self._early_speech: list[np.ndarray] = []
        self._speech = Speech(settings["audio"]["output"]["speed"])  # Made, which may be more than is sent.
        self.num_written = 0
        self._usage: dict[str, Any] = {}
        self._last_delta = ChatDelta()
        self._finish_reason: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_started = asyncio.Event()
        self._unanswered_at: float | None = None  # Its turn has no words.

    @property
    def played_at(self) -> float | None:
        """When its message was played, or its turn was found to have no words, as the time of the event loop; None:
        neither."""
        return self._unanswered_at if self._message is None else self._message.played_at

    def start(self) -> asyncio.Task[None]:
        """Runs it in a task."""
        self._task = self._session.start(self._run())
        return self._task

    @property
    def turn(self) -> Item:
        """The last item that the model reads."""
        return self._items[-1]

    def matches(self, settings: Values, items: Sequence[Item]) -> bool:
        """Whether it is as good as a new one with this configuration that reads these items: it runs, nothing has
        failed, and no ASR stage has written a text among the items before the last since it was made."""
        return (
            self._task is not None
            and not self._task.done()
            and self._error is None
            and len(items) == len(self._items)
            and all(item is own for item, own in zip(items, self._items, strict=True))
            and settings == self._settings
            and self._messages(items[:-1]) == self._messages_before
        )

    def promote(self) -> None:
        """Its turn has ended: the client gets what has been made at once, and the rest as that of any other."""
        self._window.promote()
        self._is_promoted.set()

    async def cancel(self, reason: CancelReason) -> None:
        """Aborts it; returns when its last event was sent: none, if it is pending. Nothing, if it is ending already."""
        assert self._task is not None
        await self._has_started.wait()  # A task that is cancelled before would not run at all.
        if self._cancel_reason is None and self._status == "in_progress":
            self._cancel_reason = reason
            self._task.cancel()
        await asyncio.wait([self._task])

    async def close(self) -> None:
        """Aborts it without a further event."""
        assert self._task is not None
        await end(self._task)

    async def _run(self) -> None:
        self._has_started.set()
        try:
            if self._turn is not None and not await self._has_words(self._turn):
                self._unanswered_at = asyncio.get_running_loop().time()
                return
        except asyncio.CancelledError:
            if self._cancel_reason is None:
                raise
            return
        await self._answer()

    async def _has_words(self, turn: Item) -> bool:
        try:
            await write_texts(self._session, [turn])
        except EventError:
            return True  # The answer fails with the same error, and the client gets it.
        return any(sound.text for sound in turn.sounds.values())

    def _messages(self, items: Sequence[Item]) -> list[Any]:
        return to_messages(self._settings["instructions"], items)

    async def _answer(self) -> None:
        reader = asyncio.create_task(self._read())
        try:
            if not await self._wait_for_promotion():
                return
            self.is_pending = False
            await self._session.send("response.created", response=self._as_dict())
            await self._send_deltas()
            self._status, self._details = "completed", None
            if self._finish_reason == "length":
                self._status, self._details = "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}
        except (EventError, PipelineFullError) as error:
            self._status, self._details = "failed", {"type": "failed", "error": as_event_error(error).as_dict()}
        except asyncio.CancelledError:
            if self._cancel_reason is None:
                raise
            if self.is_pending:
                return
            self._status, self._details = "cancelled", {"type": "cancelled", "reason": self._cancel_reason}
        finally:
            try:
                await end(reader)
            finally:
                self._deltas.clear()
                self._early_speech.clear()
                self._unsent.release()
        item_status = "completed" if self._status == "completed" else "incomplete"
        for output in self._outputs:
            await output.finish(item_status)
        await self._session.send("response.done", response=self._as_dict())

    async def _wait_for_promotion(self) -> bool:
        """Whether it was promoted in time."""
        try:
            async with asyncio.timeout(MAX_SPECULATIVE_S):
                await self._is_promoted.wait()
        except TimeoutError:
            return False
        return True

    async def _read(self) -> None:
        """Reads the deltas as they are made. An answer that is only function calls ends with them, unspoken."""
        has_text, has_calls = False, False
        try:
            session = self._session
            if session.chat.asr_stage is not None:
                await write_texts(session, self._items)
                self._request.messages = self._messages(self._items)
            self._unsent.set(MAX_UNSENT_BYTES)  # That the chat keeps for its reader.
            deltas = deltas_of(session, self._request, self._media, self._window.render)
            async with aclosing(deltas) as answer:
                async for delta in answer:
                    self._unsent.set(self._unsent.num_bytes + delta.num_bytes)
                    self._note(delta)
                    has_text |= bool(delta.text.strip())
                    has_calls |= bool(delta.tool_calls)
                    await self._deltas.put(delta)
                    if has_calls and not has_text and delta.finish_reason:
                        break
            self._speech.is_made = True
        except Exception as error:
            self._error = as_event_error(error)
        self._deltas.close()

    def _note(self, delta: ChatDelta) -> None:
        self.num_written = (delta.usage or {}).get("completion_tokens") or self.num_written
        self._speech.text_length += spoken_length(delta.text)
        if delta.speech is not None:
            self._speech.made_ms += 1000 * delta.speech.shape[-1] / self._session.sample_rate / self._speech.speed

    async def _send_deltas(self) -> None:
        while (delta := await self._deltas.get()) is not None:
            self._usage = delta.usage or self._usage
            self._last_delta = delta
            self._finish_reason = delta.finish_reason or self._finish_reason
            await self._take(delta)
            self._unsent.set(self._unsent.num_bytes - delta.num_bytes)
        if self._error is not None:
            raise self._error
        if isinstance(self._message, SpokenMessage):
            await self._message.end_speech()

    async def _take(self, delta: ChatDelta) -> None:
        if delta.text:
            await self._add_text(delta.text)
        for call in delta.tool_calls:
            await self._add_to_call(call)
        if delta.speech is not None and isinstance(self._message, SpokenMessage):
            await self._message.speak(delta.speech)
        elif delta.speech is not None:
            self._early_speech.append(delta.speech)
            self._unsent.set(self._unsent.num_bytes + delta.speech.nbytes)

    async def _add_text(self, text: str) -> None:
        if self._message is None:
            if not text.strip():
                return
            spoken = self._settings["output_modalities"] == ["audio"]
            message = (SpokenMessage if spoken else WrittenMessage)(self._writer, len(self._outputs))
            message.item.speech = self._speech
            await self._open(message)
            self._message = message
        await self._message.write(text)
        if isinstance(self._message, SpokenMessage):
            early, self._early_speech = self._early_speech, []
            for samples in early:
                await self._message.speak(samples)
                self._unsent.set(self._unsent.num_bytes - samples.nbytes)

    async def _add_to_call(self, delta: dict[str, Any]) -> None:
        function = delta.get("function") or {}
        call = self._calls.get(delta["index"])
        if call is None:
            call_id = delta.get("id") or new_id("call")
            call = Call(self._writer, len(self._outputs), call_id, function.get("name") or "")
            self._calls[delta["index"]] = call
            await self._open(call)
        if arguments := function.get("arguments"):
            await call.write(arguments)

    async def _open(self, output: Output) -> None:
        self._outputs.append(output)
        await output.open()

    def _as_dict(self) -> dict[str, Any]:
        output = self._settings["audio"]["output"]
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": self._status,
            "status_details": self._details,
            "output": [output.item.data for output in self._outputs],
            "conversation_id": None if self._writer.conversation is None else self._writer.conversation.id,
            "output_modalities": self._settings["output_modalities"],
            "max_output_tokens": self._settings["max_output_tokens"],
            "audio": {"output": {"format": output["format"], "voice": voice_name(output["voice"])}},
            "usage": None if self._status == "in_progress" else self._usage_dict(),
            "metadata": self._metadata,
        }

    def _usage_dict(self) -> dict[str, Any]:
        usage = self._usage
        read, written = usage.get("prompt_tokens", 0), usage.get("completion_tokens") or 0
        audio_tokens = (usage.get("completion_tokens_details") or {}).get("audio_tokens", 0)
        of_media = self._last_delta.mm_token_counts
        return {
            "total_tokens": read + written,
            "input_tokens": read,
            "output_tokens": written,
            "input_token_details": {
                "text_tokens": read - sum(of_media.values()),
                "audio_tokens": of_media.get("audio", 0),
                "image_tokens": of_media.get("image", 0),
                "cached_tokens": self._last_delta.num_cached_tokens,
            },
            "output_token_details": {"text_tokens": written - audio_tokens, "audio_tokens": audio_tokens},
        }


class Speculations:
    """The speculative answers of all sessions of one server. For its event loop.

    Attributes:
        counts: Of all that ever ran; read by any thread.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: How many may run at once."""
        self._limit = limit
        self._running: dict[Response, asyncio.Task[None]] = {}
        self.counts = SpeculationCounts()

    @property
    def has_room(self) -> bool:
        """Whether one more may run."""
        return len(self._running) < self._limit

    def start(self, response: Response) -> None:
        """Runs a speculative response."""
        task = self._running[response] = response.start()
        self.counts.started += 1
        task.add_done_callback(lambda _: self._end(response))

    def promote(self, response: Response) -> asyncio.Task[None]:
        """Has the client get it."""
        self.counts.promoted += 1
        response.promote()
        return self._running.pop(response)

    def drop(self, response: Response) -> None:
        """Aborts it, if it runs."""
        if response in self._running:
            self._running[response].cancel()

    def _end(self, response: Response) -> None:
        if self._running.pop(response, None) is not None:
            self.counts.wasted_tokens += response.num_written


class Speculation:
    """The speculative answer of one session, the last that was begun and not dropped."""

    def __init__(self, speculations: Speculations) -> None:
        self._speculations = speculations
        self._response: Response | None = None

    @property
    def has_room(self) -> bool:
        """See `Speculations`."""
        return self._speculations.has_room

    def start(self, response: Response) -> None:
        """Runs the answer to a turn that has paused, and is not in the conversation; the one before was dropped."""
        self._speculations.start(response)
        self._response = response

    def turn_of(self, sound: Sound, item_id: str, asr_settings: dict[str, Any]) -> Item | None:
        """The turn that an answer was begun to, if this is it: it has the same sound before its last pause.

        Args:
            sound, item_id, asr_settings: Of the turn, which has ended.
        """
        if self._response is None:
            return None
        turn = self._response.turn
        heard = turn.sounds[0].samples
        is_same = (
            (item_id, asr_settings) == (turn.id, turn.asr_settings)
            and sound.num_spoken == len(heard)
            and np.array_equal(sound.spoken, heard)
        )
        return turn if is_same else None

    def promote(self, settings: Values, items: Sequence[Item]) -> tuple[Response, asyncio.Task[None]] | None:
        """The running response that is what one with this configuration would be that reads these items; the client
        gets it from now on. None: there is none."""
        response = self._response
        if response is None or not response.matches(settings, items):
            return None
        self._response = None
        return response, self._speculations.promote(response)

    def drop(self) -> None:
        """Aborts the answer, if there is one."""
        if self._response is not None:
            self._speculations.drop(self._response)
            self._response = None
