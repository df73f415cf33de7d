# SPDX-License-Identifier: Apache-2.0
"""WS /v1/audio/speech/stream: texts in pieces, each spoken while it is being written.

Names of events are those of Together AI and of Alibaba Cloud for the text (`input_text_buffer.*`), and of OpenAI's
stream of /v1/audio/speech for the speech. A model that reads a text in pieces gets each as it comes, in one request;
for any other one each sentence is a request, the next of which begins while one is spoken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, ConfigDict, Field
from vllm.exceptions import VLLMClientError

from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.json_body import num_bytes
from vllm_omni.entrypoints.openai.media_output import finish_reason_of
from vllm_omni.entrypoints.openai.realtime.chat_stream import as_event_error
from vllm_omni.entrypoints.openai.realtime.event_session import EventSession, Sessions, deny
from vllm_omni.entrypoints.openai.realtime.protocol import EventError, new_id, read_fields
from vllm_omni.entrypoints.openai.request_context import RequestContext, end
from vllm_omni.entrypoints.openai.server_args import flag
from vllm_omni.entrypoints.openai.speech import ServingSpeech, SpeechUsage, VoiceSettings
from vllm_omni.entrypoints.openai.speech_request import MAX_INPUT_CHARS, SpeechFormat, SpeechSettings
from vllm_omni.entrypoints.openai.streamed_chat import UnsentQueue
from vllm_omni.errors import InvalidRequestError, OmniError, PipelineFullError
from vllm_omni.events import OmniEvent
from vllm_omni.stage.sentences import SentenceCutter

PATH = "/v1/audio/speech/stream"

MAX_UTTERANCES = 64
"""Of one session, that have not been spoken."""

_MAX_SENTENCES = 2  # At once: one is sent, the next is made.

Send = Callable[..., Awaitable[None]]


class SpeechStreamSettings(SpeechSettings):
    """How the texts of a session are spoken."""

    response_format: SpeechFormat = Field("pcm", description="Each utterance is one file of this format.")


class _Event(BaseModel):
    model_config = ConfigDict(extra="allow")  # Which is then refused by its name.

    event_id: str | None = None


class SessionUpdate(_Event):
    """Changes how later utterances are spoken. What is not given stays."""

    type: Literal["session.update"]
    session: dict[str, Any]


class InputTextBufferAppend(_Event):
    """A piece of the text of an utterance."""

    type: Literal["input_text_buffer.append"]
    text: str


class InputTextBufferCommit(_Event):
    """The text of the utterance is complete; the next piece belongs to another."""

    type: Literal["input_text_buffer.commit"]


class InputTextBufferClear(_Event):
    """Cancels all that has not been sent: texts, and the speech of all utterances."""

    type: Literal["input_text_buffer.clear"]


class SpeechStream(EventSession):
    """One session. `run` it once."""

    _event_types: ClassVar = {
        "session.update": SessionUpdate,
        "input_text_buffer.append": InputTextBufferAppend,
        "input_text_buffer.commit": InputTextBufferCommit,
        "input_text_buffer.clear": InputTextBufferClear,
    }

    def __init__(
        self, websocket: WebSocket, sessions: Sessions, speech: ServingSpeech, settings: VoiceSettings
    ) -> None:
        """`settings`: Those that it starts with."""
        super().__init__(websocket, sessions)
        self._speech, self._settings = speech, settings
        self._text_share, self._voice_share = self._share(), self._share()
        self._open: Utterance | None = None  # Whose text is not complete.
        self._speaking: dict[Utterance, asyncio.Task[None]] = {}  # In turn; the first one is spoken.
        self._handlers = {
            "session.update": self._update,
            "input_text_buffer.append": self._append,
            "input_text_buffer.commit": self._commit,
            "input_text_buffer.clear": self._clear,
        }

    def _session(self) -> Mapping[str, Any]:
        given = self._settings.request.model_dump(exclude_none=True, exclude={"ref_audio", "context"})
        model = {"model": self._speech.model_names[0]}
        return {"id": self.id, "object": "speech.session", "expires_at": int(self._expires_at), **model, **given}

    def _is_busy(self) -> bool:
        return any(utterance is not self._open for utterance in self._speaking)

    def _release(self) -> None:
        self._speaking.clear()
        self._text_share.release()
        self._voice_share.release()

    def _after_event(self) -> None:
        self._text_share.set(min(self._num_bytes, self._text_share.num_bytes))

    @property
    def _num_bytes(self) -> int:
        return sum(utterance.num_bytes for utterance in self._speaking)

    async def _update(self, event: SessionUpdate) -> None:
        before = self._settings.request.model_dump(exclude_unset=True)
        fields = {name: value for name, value in {**before, **event.session}.items() if value is not None}
        request = read_fields(SpeechStreamSettings, fields, ("session",))
        try:
            settings = await self._speech.read(request, self._websocket)
        except (VLLMClientError, OmniError, ValueError) as error:
            refusal = as_event_error(error)
            refusal.param = None if refusal.param is None else f"session.{refusal.param}"
            raise refusal from error
        self._voice_share.set(num_bytes([settings.information, request.model_dump()]))
        self._settings = settings
        await self._send("session.updated", session=self._session())

    async def _append(self, event: InputTextBufferAppend) -> None:
        num_bytes, limit = self._num_bytes + len(event.text.encode()), self._limits.max_realtime_text_bytes
        if num_bytes > limit:
            raise EventError(
                f"a session keeps {limit} bytes of texts ({flag('max_realtime_text_bytes')}); wait for their speech",
                "text",
                "text_limit_exceeded",
            )
        self._text_share.set(num_bytes)
        if self._open is None:
            if len(self._speaking) >= MAX_UTTERANCES:
                raise EventError(f"{MAX_UTTERANCES} utterances wait to be spoken", code="too_many_utterances")
            before = next(reversed(self._speaking.values()), None)
            self._open = Utterance(self._speech, self._settings, self._send, self._websocket)
            self._speaking[self._open] = self._start(self._speak(self._open, before))
        self._open.append(event.text)

    async def _speak(self, utterance: Utterance, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        await utterance.speak()
        self._speaking.pop(utterance, None)

    async def _commit(self, event: InputTextBufferCommit) -> None:
        if self._open is None or self._open.is_blank:
            raise EventError("there is no text to be spoken; append some", code="input_text_buffer_commit_empty")
        utterance, self._open = self._open, None
        await self._send("input_text_buffer.committed", item_id=utterance.id)
        utterance.commit()

    async def _clear(self, event: InputTextBufferClear) -> None:
        cancelled, self._speaking, self._open = self._speaking, {}, None
        await asyncio.gather(*(end(task) for task in cancelled.values()))
        for utterance in cancelled:
            if not utterance.is_done:
                await self._send("speech.audio.done", item_id=utterance.id, status="cancelled")
        await self._send("input_text_buffer.cleared")


class Utterance:
    """One text, that is spoken as it comes. `speak` it once.

    Attributes:
        id: Its id.
        num_bytes: Of its text that is not being spoken yet.
        is_blank: There is nothing in its text so far.
        is_done: Its last event was sent.
    """

    def __init__(self, speech: ServingSpeech, settings: VoiceSettings, send: Send, websocket: WebSocket) -> None:
        """`send`: Sends an event: its type and fields."""
        self.id = new_id("item")
        self.num_bytes, self.is_blank, self.is_done = 0, True, False
        self._speech, self._settings, self._send, self._websocket = speech, settings, send, websocket
        self._num_chars = 0
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._usages: list[SpeechUsage] = []
        self._finish_reason = "stop"

    def append(self, text: str) -> None:
        """Adds to its text. What follows when it has failed is not spoken.

        Raises:
            EventError: It is too long for a model that gets it as a whole.
        """
        if self.is_done:
            return
        self._num_chars += len(text)
        if self._speech.reads_pieces and self._num_chars > MAX_INPUT_CHARS:
            raise EventError(
                f"an utterance has at most {MAX_INPUT_CHARS} characters; commit it, and go on in the next one",
                "text",
                "text_limit_exceeded",
            )
        self.is_blank = self.is_blank and not text.strip()
        self.num_bytes += len(text.encode())
        self._pieces.put_nowait(text)

    def commit(self) -> None:
        """Its text is complete."""
        self._pieces.put_nowait(None)

    async def speak(self) -> None:
        """Sends its speech, and how it ended."""
        error: Mapping[str, Any] | None = None
        try:
            await self._send_speech()
        except (OmniError, OmniHTTPError, VLLMClientError) as failure:
            error = as_event_error(failure).as_dict()
        if error is not None:
            await self._send("speech.audio.done", item_id=self.id, status="failed", error=error)
        else:
            usage = {name: sum(getattr(each, name) for each in self._usages) for name in SpeechUsage.model_fields}
            ended = {"status": "completed", "finish_reason": self._finish_reason, "usage": usage}
            await self._send("speech.audio.done", item_id=self.id, **ended)
        self.is_done = True

    async def _send_speech(self) -> None:
        file = self._speech.new_file(self._settings.request, stream=True, is_joined=True)
        refusal: InvalidRequestError | None = None
        async with aclosing(self._requests()) as requests:
            async for request in requests:
                start = file.seconds
                try:
                    async with aclosing(request.events()) as events:
                        async for event in events:
                            await self._send_audio(await file.add(event))
                except InvalidRequestError as error:
                    if error.stage_id is None:
                        raise
                    refusal = error  # The voice speaks no word of it: it is left out, as in a longer text.
                    continue
                self._usages.append(self._speech.usage_of(file.output))
                if finish_reason_of(file.output) == "length":
                    self._finish_reason = "length"
                times = {"sentences": [request.text], "start": [start], "end": [file.seconds]}
                await self._send("timestamps", item_id=self.id, sentence_timestamps=times)
        if not self._usages and refusal is not None:
            raise refusal
        if self._usages:
            await self._send_audio(await file.finish())

    async def _send_audio(self, data: bytes) -> None:
        if data:
            await self._send("speech.audio.delta", item_id=self.id, audio=data)

    async def _requests(self) -> AsyncGenerator[_Request, None]:
        """The requests to the pipeline, in order; each has begun."""
        if self._speech.reads_pieces:
            whole = _Request(self, self._text())
            try:
                yield whole
            finally:
                await whole.close()
            return
        begun: asyncio.Queue[_Request | None] = asyncio.Queue()
        places = asyncio.Semaphore(_MAX_SENTENCES)
        running: set[_Request] = set()

        async def begin_all() -> None:
            async with aclosing(self._sentences()) as sentences:
                async for sentence in sentences:
                    await places.acquire()
                    request = _Request(self, sentence, can_wait=bool(running))
                    running.add(request)
                    begun.put_nowait(request)

        beginning = asyncio.create_task(begin_all())
        beginning.add_done_callback(lambda _: begun.put_nowait(None))
        try:
            while (request := await begun.get()) is not None:
                yield request
                await request.close()
                running.discard(request)
                places.release()
            await beginning
        finally:
            await end(beginning)
            await asyncio.gather(*(request.close() for request in running))

    async def _text(self) -> AsyncGenerator[str, None]:
        while (piece := await self._pieces.get()) is not None:
            self.num_bytes -= len(piece.encode())
            yield piece

    async def _sentences(self) -> AsyncGenerator[str, None]:
        """Those with words."""
        cutter = SentenceCutter(first_is_clause=True)
        is_last = False
        while not is_last:
            is_last = (piece := await self._pieces.get()) is None
            text = piece or ""
            for start in range(0, len(text) or 1, MAX_INPUT_CHARS):  # Each sentence copies the rest of what was added.
                for sentence in cutter.add(text[start : start + MAX_INPUT_CHARS], is_last=is_last):
                    self.num_bytes -= len(sentence.encode())
                    if any(map(str.isalnum, sentence)):
                        yield sentence

    def start(self, text: str | AsyncGenerator[str, None]) -> Awaitable[AsyncGenerator[OmniEvent, None]]:
        """Starts a request to the pipeline, whose context is the task's."""
        RequestContext.start(RequestContext.of(self._websocket))
        return self._speech.events(text, self._settings, self._websocket, stream=self._speech.streams)


class _Request:
    """One request to the pipeline, made in a task of its own as soon as this exists.

    Attributes:
        text: What is spoken; of a text in pieces what has come of it.
    """

    def __init__(self, utterance: Utterance, text: str | AsyncGenerator[str, None], *, can_wait: bool = False) -> None:
        """`can_wait`: If the pipeline is full, it begins again when its events are read."""
        self._utterance, self._source, self._can_wait = utterance, text, can_wait
        self.text = text if isinstance(text, str) else ""
        self._begin()

    def _begin(self) -> None:
        self._events: UnsentQueue[OmniEvent | Exception] = UnsentQueue(_num_bytes_of_event)
        self._task = asyncio.create_task(self._make())

    async def _make(self) -> None:
        last: Exception | None = None
        try:
            source = self._source if isinstance(self._source, str) else self._noted(self._source)
            async with aclosing(await self._utterance.start(source)) as events:
                async for event in events:
                    await self._events.put(event)
        except Exception as error:
            last = error
        await self._events.put(last)

    async def _noted(self, pieces: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        async with aclosing(pieces):
            async for piece in pieces:
                self.text += piece
                yield piece

    async def events(self) -> AsyncGenerator[OmniEvent, None]:
        """Raises what the request raised."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, PipelineFullError) and self._can_wait:
                self._can_wait = False
                self._begin()
            elif isinstance(event, Exception):
                raise event
            else:
                yield event

    async def close(self) -> None:
        """Aborts it, if it runs."""
        await end(self._task)


def _num_bytes_of_event(event: OmniEvent | Exception) -> int:
    return 0 if isinstance(event, Exception) else event.num_bytes


router = APIRouter()


@router.websocket(PATH)
async def stream_speech(websocket: WebSocket) -> None:
    """The speech of texts that come in pieces."""
    speech: ServingSpeech | None = websocket.app.state.omni_handlers.get("audio")
    sessions: Sessions = websocket.app.state.omni_sessions
    if speech is None:
        await deny(websocket, "this model makes no speech", HTTPStatus.BAD_REQUEST)
        return

    async def open(websocket: WebSocket) -> SpeechStream:
        speech.client.check_admission()
        request = SpeechStreamSettings.model_validate({"model": websocket.query_params.get("model")})
        return SpeechStream(websocket, sessions, speech, await speech.read(request, websocket))

    await sessions.serve(websocket, open)
