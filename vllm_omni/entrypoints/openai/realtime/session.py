# SPDX-License-Identifier: Apache-2.0
"""One realtime session: its configuration, conversation and input buffer, and what each event of the client does.

Events are handled one after the other; responses and transcriptions run beside them, each in a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

from openai.types.realtime import RealtimeResponseCreateParams
from openai.types.realtime.response_item_reference import ResponseItemReference
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.media_input import MIN_AUDIO_SECONDS
from vllm_omni.entrypoints.openai.media_request import MediaFetcher
from vllm_omni.entrypoints.openai.realtime.audio import FORMATS, InputBuffer, Sound
from vllm_omni.entrypoints.openai.realtime.chat_stream import as_event_error
from vllm_omni.entrypoints.openai.realtime.config import SessionRules, Values
from vllm_omni.entrypoints.openai.realtime.conversation import (
    Conversation,
    Item,
    Picture,
    decode_base64,
    read_item,
)
from vllm_omni.entrypoints.openai.realtime.event_session import EventSession, Sessions
from vllm_omni.entrypoints.openai.realtime.output_items import SessionContext
from vllm_omni.entrypoints.openai.realtime.protocol import EventError, new_id
from vllm_omni.entrypoints.openai.realtime.response import Response, Speculation, Speculations
from vllm_omni.entrypoints.openai.realtime.transcription import InputTranscriptions
from vllm_omni.entrypoints.openai.realtime.turn_detection import IdleTimeout, Turn, TurnDetector
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.server_args import flag
from vllm_omni.errors import PipelineFullError

MIN_TURN_S = 0.1  # As OpenAI's.

_MAX_RESPONSES = 16  # At once.
MAX_ITEMS = 10_000
"""Of a conversation."""


class Session(EventSession):
    """One session. `run` it once."""

    def __init__(
        self,
        websocket: WebSocket,
        chat: OmniServingChat,
        rules: SessionRules,
        values: Values,
        sessions: Sessions,
        *,
        sample_rate: int,
        threads: Executor,
        media: MediaFetcher,
        speculations: Speculations,
    ) -> None:
        """
        Args:
            websocket: See `EventSession`.
            values: The configuration that it starts with.
            sample_rate: Of the model's speech, in Hz.
            threads: See `TurnDetector`.
            media: Reads the images of items.
            speculations: Those of all sessions.
        """
        super().__init__(websocket, sessions)
        self._rules, self._media, self._chat, self._threads = rules, media, chat, threads
        self._buffer_share = self._share()
        self._conversation = Conversation()
        self._context = SessionContext(
            send=self._send,
            start=self._start,
            chat=chat,
            client=self._client,
            prompt_limits=rules.prompt_limits,
            sample_rate=sample_rate,
            lead_s=self._limits.realtime_lead_s,
            share=self._share,
        )
        self._responses: dict[str, Response] = {}
        self._speculation = Speculation(speculations)
        self._transcriptions = InputTranscriptions(self._context, values["model"])
        self._turn_id: str | None = None  # The id of the item that is spoken.
        self._paused_ms: int | None = None  # Its last pause.
        self._idle = IdleTimeout()
        self._values: Values = {}
        self._configure(values)
        self._handlers = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.truncate": self._truncate_item,
            "conversation.item.delete": self._delete_item,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
        }

    def _release(self) -> None:
        self._speculation.drop()
        self._conversation.clear()
        self._buffer.clear()
        self._buffer_share.release()

    def _is_busy(self) -> bool:
        return bool(self._responses)

    def _after_event(self) -> None:
        self._buffer_share.set(min(self._buffer.num_bytes, self._buffer_share.num_bytes))

    # The session.

    def _session(self) -> Values:
        return {"id": self.id, "expires_at": int(self._expires_at), **self._values}

    async def _update(self, event: Any) -> None:
        self._configure(self._rules.updated(self._values, event.session))
        await self._send("session.updated", session=self._session())

    def _configure(self, values: Values) -> None:
        """Starts the buffer and the detector anew, if what they depend on has changed."""
        before = self._values.get("audio", {}).get("input")
        self._values, after = values, values["audio"]["input"]
        if before is None or before["format"] != after["format"]:
            self._buffer = InputBuffer(FORMATS[after["format"]["type"]])
            before = None
        if before is None or before["turn_detection"] != after["turn_detection"]:
            self._detect(after["turn_detection"])

    def _detect(self, settings: Values | None) -> None:
        self._detector = None
        if settings is not None:
            self._detector = TurnDetector(settings, self._buffer.format.sample_rate, self._buffer.end_ms, self._threads)
        self._turn_id = None
        self._drop_speculation()
        self._idle.restart()

    # The input buffer.

    async def _append(self, event: Any) -> None:
        if not self._rules.accepts_audio:
            raise EventError("this model does not accept audio; send text", "audio", "unsupported")
        start_ms = self._buffer.end_ms
        data = decode_base64(event.audio, "audio")
        self._buffer_share.set(self._buffer.num_bytes + self._buffer.num_bytes_of(data))
        samples = self._buffer.append(data)
        if self._detector is None:
            self._buffer.keep_last(self._max_ms)
            return
        for turn in await self._detector.feed(samples):
            await self._attempt(self._follow(turn), event.event_id)  # An error of one leaves the others.
        if self._turn_id is not None:
            self._buffer.keep_last(self._max_ms)
            return
        timeout_ms = self._values["audio"]["input"]["turn_detection"].get("idle_timeout_ms")
        if self._idle.feed(start_ms, self._buffer.end_ms, timeout_ms):
            await self._answer_silence()
        elif self._idle.start_ms is None:
            self._buffer.keep_last(self._detector.num_kept_ms)

    @property
    def _truncates(self) -> bool:
        return self._values["truncation"] != "disabled"

    async def _make_room(self, num_chars: int = 0) -> None:
        """Deletes the oldest turns until there is room for one more item, unless truncation is disabled."""
        limit = self._limits.max_realtime_text_bytes
        while self._truncates and num_chars <= limit and (oldest := self._conversation.oldest):
            if len(self._conversation) < MAX_ITEMS and self._conversation.num_chars + num_chars <= limit:
                return
            for item in self._conversation.turn(oldest):
                self._conversation.delete(item.id)
                await self._send("conversation.item.deleted", item_id=item.id)

    def _check_room(self, param: str, *, seconds: float = 0.0, num_chars: int = 0) -> None:
        if len(self._conversation) >= MAX_ITEMS:
            raise EventError(f"a session keeps {MAX_ITEMS} items; delete some", code="item_limit_exceeded")
        limit = self._limits.max_realtime_text_bytes
        if num_chars and self._conversation.num_chars + num_chars > limit:
            raise EventError(
                f"a session keeps {limit} bytes of texts and images ({flag('max_realtime_text_bytes')}); delete items",
                param,
                "text_limit_exceeded",
            )
        limit_s = self._limits.max_realtime_audio_s
        if seconds > limit_s:
            raise EventError(
                f"the item has {seconds:.0f} s of sound, and a session keeps {limit_s:g} s "
                f"({flag('max_realtime_audio_s')})",
                param,
                "audio_limit_exceeded",
            )

    @property
    def _max_ms(self) -> int:
        return int(1000 * self._limits.max_realtime_audio_s)

    async def _follow(self, turn: Turn) -> None:
        """Speech has started, which interrupts a response; has paused, when the answer is begun, or gone on; or has
        stopped, which asks for a response."""
        settings = self._values["audio"]["input"]["turn_detection"]
        if turn.kind == "started":
            self._drop_speculation()
            self._turn_id, self._paused_ms = new_id("item"), None
            self._idle.stop()
            self._buffer.drop_before(turn.at_ms)
            await self._send("input_audio_buffer.speech_started", audio_start_ms=turn.at_ms, item_id=self._turn_id)
            if settings["interrupt_response"] and (response := self._active()):
                await response.cancel("turn_detected")
            return
        if turn.kind == "paused":
            if self._turn_id is not None:
                self._paused_ms = turn.at_ms
                may_be_answered = turn.may_end and settings["create_response"]
                self._speculate(self._turn_id, self._buffer.copy(turn.at_ms), may_be_answered)
            return
        if turn.kind == "resumed":
            self._paused_ms = None
            self._drop_speculation()
            return
        item_id = self._turn_id or new_id("item")
        await self._send("input_audio_buffer.speech_stopped", audio_end_ms=turn.at_ms, item_id=item_id)
        num_spoken = None if self._paused_ms is None else self._buffer.num_samples(self._paused_ms)
        sound = self._buffer.take(turn.at_ms)
        sound.num_spoken = num_spoken
        if sound.seconds < MIN_AUDIO_SECONDS:  # The client has committed or cleared it.
            self._turn_id = None
            self._drop_speculation()
            return
        try:
            item = await self._commit_sound(sound, item_id)
            if settings["create_response"]:
                await self._respond(None, None if self._chat.asr_stage is None else item)
        finally:
            self._speculation.drop()  # Unless it was promoted.

    def _speculate(self, item_id: str, sound: Sound, may_be_answered: bool) -> None:
        """Begins what follows if the turn ends with this pause: its transcript, and perhaps its answer."""
        asr_settings, by_stage = self._rules.asr_settings(self._values), self._chat.asr_stage is not None
        if by_stage:
            self._transcriptions.speculate(sound, asr_settings)
        self._speculation.drop()
        if not may_be_answered or self._active() or not self._has_room_for(sound):
            return
        turn, items = _make_turn(item_id, sound, asr_settings), self._items_to_read()
        try:
            turn.count(self._share)
            settings, heard = self._rules.for_response(self._values, None), turn if by_stage else None
            response = Response(
                self._context, settings, [*items, turn], self._conversation, turn=heard, is_speculative=True
            )
        except (EventError, PipelineFullError):
            return
        self._speculation.start(response)

    def _has_room_for(self, sound: Sound) -> bool:
        """Whether the answer to a sound may be begun: the server has room, and nothing has to leave the session."""
        conversation, limit_s = self._conversation, self._limits.max_realtime_audio_s
        return (
            sound.seconds >= MIN_AUDIO_SECONDS
            and len(conversation) < MAX_ITEMS
            and conversation.num_chars <= self._limits.max_realtime_text_bytes
            and (self._chat.asr_stage is not None or conversation.seconds + sound.seconds <= limit_s)
            and self._speculation.has_room
            and self._chat.client.has_idle_room()
        )

    def _drop_speculation(self) -> None:
        """The turn goes on, or is none: nothing of what was begun is needed."""
        self._transcriptions.drop_speculative()
        self._speculation.drop()

    async def _answer_silence(self) -> None:
        """The user has said nothing for `idle_timeout_ms`: the silence is a turn, and the model may ask for one."""
        item_id, start_ms, end_ms = new_id("item"), self._idle.start_ms, self._buffer.end_ms
        assert start_ms is not None
        self._buffer.drop_before(start_ms)
        times = {"audio_start_ms": start_ms, "audio_end_ms": end_ms}
        await self._send("input_audio_buffer.timeout_triggered", **times, item_id=item_id)
        sound = self._buffer.take()
        sound.text = None if self._chat.asr_stage is None else ""
        await self._commit_sound(sound, item_id)
        if self._values["audio"]["input"]["turn_detection"]["create_response"]:
            await self._respond(None)

    async def _commit(self, event: Any) -> None:
        if self._buffer.seconds < MIN_TURN_S:
            raise EventError(
                f"the input buffer has {1000 * self._buffer.seconds:.0f} ms of sound; a turn has at least "
                f"{1000 * MIN_TURN_S:.0f} ms",
                code="input_audio_buffer_commit_empty",
            )
        if not self._truncates:
            self._check_room("audio")
        await self._commit_sound(self._buffer.take(), self._turn_id or new_id("item"))

    async def _commit_sound(self, sound: Sound, item_id: str) -> Item:
        self._turn_id = self._paused_ms = None
        self._idle.stop()
        await self._make_room()
        self._buffer_share.set(self._buffer.num_bytes)  # It has less than before.
        asr_settings = self._rules.asr_settings(self._values)
        if (item := self._speculation.turn_of(sound, item_id, asr_settings)) is not None:
            item.lengthen_sound(sound, self._share)
        else:
            item = _make_turn(item_id, sound, asr_settings)
            item.count(self._share)
        await self._send("input_audio_buffer.committed", previous_item_id=self._conversation.last_id, item_id=item_id)
        await self._add(item, None)
        if (settings := self._values["audio"]["input"]["transcription"]) is not None:
            self._transcriptions.start(item, item.sounds[0], settings)
        return item

    async def _clear(self, event: Any) -> None:
        self._buffer.clear()
        self._detect(self._values["audio"]["input"]["turn_detection"])
        await self._send("input_audio_buffer.cleared")

    # The conversation.

    async def _create_item(self, event: Any) -> None:
        item = read_item(event.item, self._buffer.format, self._rules.asr_settings(self._values), "item")
        if item.sounds and not self._rules.accepts_audio:
            raise EventError("this model does not accept audio; send text", "item.content", "unsupported")
        await self._make_room(item.num_chars_kept)
        self._check_room("item.content", seconds=item.seconds, num_chars=item.num_chars_kept)
        item.count(self._share)
        others: Iterable[Item] = () if self._truncates else self._conversation
        await self._read_images(item, sum(len(other.images) for other in others), "item")
        if item.pictures:
            await self._make_room(item.num_chars_kept)
            self._check_room("item.content", num_chars=item.num_chars_kept)
        await self._add(item, event.previous_item_id)

    async def _read_images(self, item: Item, num_others: int, at: str) -> None:
        """Fetches images, once, and refuses those that no response could read; `num_others`: those that it would read
        with them."""
        for number, (index, url) in enumerate(item.images.items(), num_others + 1):
            param = f"{at}.content[{index}].image_url"
            if number > self._rules.max_images:
                raise EventError(
                    f"this model reads {self._rules.max_images} images at once; delete items", param, "unsupported"
                )
            RequestContext.start(self._client)
            try:
                file = await self._media.image_file(url, param)
            except Exception as error:
                raise as_event_error(error, param) from error
            if (source := url if url.startswith("data:") else file) is not None:
                item.pictures[index] = Picture(source)
        item.count_pictures(self._share)

    async def _add(self, item: Item, previous_id: str | None) -> None:
        previous = self._conversation.add(item, previous_id)
        await self._send("conversation.item.added", previous_item_id=previous, item=item.data)
        await self._send("conversation.item.done", previous_item_id=previous, item=item.data)
        for unknown in self._conversation.keep_newest_sounds(
            self._limits.max_realtime_audio_s, item, whole_turns=self._truncates
        ):
            await self._send("conversation.item.deleted", item_id=unknown.id)

    async def _retrieve_item(self, event: Any) -> None:
        item = self._conversation.get(event.item_id, code="item_retrieve_invalid_item_id")  # Pipecat waits for it.
        await self._send("conversation.item.retrieved", item=await asyncio.to_thread(item.with_sound))

    async def _truncate_item(self, event: Any) -> None:
        self._conversation.get(event.item_id).truncate(event.content_index, event.audio_end_ms)
        fields = {"item_id": event.item_id, "content_index": event.content_index, "audio_end_ms": event.audio_end_ms}
        await self._send("conversation.item.truncated", **fields)

    async def _delete_item(self, event: Any) -> None:
        self._conversation.delete(event.item_id)
        await self._send("conversation.item.deleted", item_id=event.item_id)

    # Responses.

    def _active(self) -> Response | None:
        """The response that writes to the conversation."""
        return next((response for response in self._responses.values() if response.is_in_conversation), None)

    async def _create_response(self, event: Any) -> None:
        await self._respond(event.response)

    async def _respond(self, params: RealtimeResponseCreateParams | None, turn: Item | None = None) -> None:
        """`turn`: see `Response`."""
        in_conversation = params is None or params.conversation != "none"
        if in_conversation and (active := self._active()) and active.is_pending:
            await active.close()  # The new one answers its turn, too.
        if in_conversation and (active := self._active()):
            raise EventError(
                f"the conversation has an active response, {active.id}; wait for its end, or cancel it",
                code="conversation_already_has_active_response",
            )
        if len(self._responses) >= _MAX_RESPONSES:
            raise EventError(f"a session runs at most {_MAX_RESPONSES} responses at once", code="too_many_responses")
        settings = self._rules.for_response(self._values, params)
        items, own_input = self._items_to_read(), None if params is None else params.input
        if own_input is not None:
            items = await self._read_input(own_input)
        if (promoted := self._speculation.promote(settings, items) if params is None else None) is not None:
            response, task = promoted
        else:
            response = Response(
                self._context,
                settings,
                items,
                self._conversation if in_conversation else None,
                metadata=None if params is None else params.metadata,
                turn=turn,
                lasts=in_conversation and own_input is None,
            )
            task = response.start()
        self._responses[response.id] = response
        if in_conversation:
            self._idle.stop()
        task.add_done_callback(lambda _: self._end_response(response))

    async def _read_input(self, given: Sequence[Any]) -> list[Item]:
        """The input of one response: items of its own, and those of the conversation that it refers to."""
        items = self._conversation.select(given, self._buffer.format, self._rules.asr_settings(self._values))
        num_images = 0
        for i, item in enumerate(items):
            if not isinstance(given[i], ResponseItemReference):
                item.count(self._share)
                await self._read_images(item, num_images, f"response.input[{i}]")
            num_images += len(item.images)
        return items

    def _items_to_read(self) -> list[Item]:
        """What a response reads of the conversation."""
        return self._conversation.read_items() if self._truncates else list(self._conversation)

    def _end_response(self, response: Response) -> None:
        del self._responses[response.id]
        if response.is_in_conversation and response.played_at is not None:
            self._idle.start(response.played_at)

    async def _cancel_response(self, event: Any) -> None:
        response = self._active() if event.response_id is None else self._responses.get(event.response_id)
        is_unknown = response is None or response.is_pending
        if response is not None:
            await response.cancel("client_cancelled")
        if is_unknown:
            raise EventError(
                "Cancellation failed: there is no active response",  # OpenAI's words: LiveKit ignores it by them.
                None if event.response_id is None else "response_id",
                "response_cancel_not_active",
            )


def _make_turn(item_id: str, sound: Sound, asr_settings: Values) -> Item:
    content = [{"type": "input_audio", "transcript": None}]
    data = {"id": item_id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user"}
    return Item({**data, "content": content}, {0: sound}, asr_settings)
