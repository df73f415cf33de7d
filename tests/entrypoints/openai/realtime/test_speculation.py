# SPDX-License-Identifier: Apache-2.0
"""Answers that are begun at a pause: what the client gets is what it gets without, and nothing before its turn ends."""

import asyncio
import base64
import gc
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.fake_server import over_http
from tests.entrypoints.openai.realtime.fake_chat import MODEL, TONE, FakeChat, session_app
from tests.entrypoints.openai.realtime.level_detector import PausingDetector
from tests.entrypoints.openai.realtime.sessions import Session, converse, opened, types_of
from tests.entrypoints.openai.realtime.test_turns import send
from vllm_omni.entrypoints.openai.realtime import response as response_module
from vllm_omni.entrypoints.openai.realtime.event_session import Sessions
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.streamed_chat import MAX_UNSENT_BYTES, ChatDelta
from vllm_omni.metrics.stats import SpeculationCounts

SPEECH = np.full(12_000, 16_384, "<i2")
"""Half a second at 24 kHz."""
PAUSE = np.zeros(2400, "<i2")
"""100 ms, which are a pause; three of them end a turn."""
HEARING: Any = {"turn_detection": {"type": "server_vad"}}
TIMEOUT_S = 20
_ID = re.compile(r"\b(?:event|item|resp|conv|call)_[0-9a-f]{8,}")


@pytest.fixture(autouse=True)
def pausing_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.entrypoints.openai.realtime.session.TurnDetector", PausingDetector)
    monkeypatch.setattr("vllm_omni.entrypoints.openai.realtime.turn_detection.is_installed", lambda: True)


class SlowChat(FakeChat):
    """Answers when it may.

    Attributes:
        may_end: Whether an answer goes on after its first delta.
        num_begun, num_ended, num_complete: Answers of which the first delta was read; that have ended, aborted or not;
            whose last delta was made.
        heard: Of each request the samples of its sounds, or its texts.
        error: What the next answer raises, once.
    """

    def __init__(self, *, hears: bool = True, may_end: bool = True) -> None:
        super().__init__(hears=hears)
        self.may_end = may_end
        self.num_begun = self.num_ended = self.num_complete = 0
        self.heard: list[list[Any]] = []
        self.error: Exception | None = None

    async def create_deltas(self, request: Any) -> AsyncGenerator[ChatDelta, None]:
        kept = RequestContext.current().kept_sounds
        answer = await super().create_deltas(request)
        parts = [
            part for message in request.messages for part in message.get("content") or () if isinstance(part, dict)
        ]
        self.heard.append(
            [part["text"] if part["type"] == "text" else len(kept[part["audio_url"]["url"]]()[0]) for part in parts]
        )
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return answer

    async def _stream(self, deltas: list[ChatDelta]) -> AsyncGenerator[ChatDelta, None]:
        try:
            for i, delta in enumerate(deltas):
                yield delta
                self.num_begun += not i
                while not self.may_end:
                    await asyncio.sleep(0.01)
            usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
            self.num_complete += 1
            yield ChatDelta(finish_reason="stop", usage=usage)
        finally:
            self.num_ended += 1


def answer_by_length(messages: list[Any]) -> list[ChatDelta]:
    return [ChatDelta(text=f"Message {len(messages)} is "), ChatDelta(text="heard."), *[ChatDelta(speech=TONE)] * 3]


def sessions_of(app: FastAPI) -> Sessions:
    sessions: Sessions = app.state.omni_realtime._sessions
    return sessions


def counts_of(app: FastAPI) -> tuple[int, int, int]:
    counts: SpeculationCounts = app.state.omni_realtime.speculations.counts
    return counts.started, counts.promoted, counts.wasted_tokens


async def wait_until(condition: Callable[[], bool]) -> None:
    """Of the server's thread, which has no event for it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def hear(session: Session, **settings: Any) -> None:
    await session.configure(audio={"input": HEARING}, **settings)


async def pause(session: Session, sound: np.ndarray = SPEECH) -> None:
    """Speaks, and pauses."""
    await send(session, np.concatenate([sound, PAUSE]))


async def is_unseen(session: Session) -> None:
    """Checks that nothing has come for what was begun, and that its turn is unknown."""
    events = await session.until("input_audio_buffer.speech_started")
    assert len(events) == 1, types_of(events)
    await session.connection.conversation.item.retrieve(item_id=events[0].item_id)
    assert (await session.error()).code == "item_retrieve_invalid_item_id"


async def stop(session: Session) -> list[Any]:
    """Stays silent after a pause; the events of the turn's end and its answer."""
    await send(session, np.concatenate([PAUSE, PAUSE]))
    return await session.until("response.done")


def as_json(events: list[Any]) -> list[Any]:
    """Events with their ids numbered as they come."""
    ids: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return ids.setdefault(match[0], f"id {len(ids)}")

    return [json.loads(_ID.sub(number, event.model_dump_json(exclude={"event_id"}))) for event in events]


def without_speculation(chat: SlowChat, main: Callable[[Session], Any]) -> Any:
    app = session_app(chat, max_realtime_speculative_responses=0)
    answer = converse(app, main, model=MODEL, manual=False)
    assert counts_of(app) == (0, 0, 0)
    return answer


def make_chat(*, hears: bool) -> SlowChat:
    chat = SlowChat(hears=hears)
    chat.answer = answer_by_length
    return chat


@pytest.fixture(params=[True, False], ids=["hears", "reads"])
def chat(request: pytest.FixtureRequest) -> Iterator[SlowChat]:
    """An omni model, or one with an ASR stage."""
    chat = make_chat(hears=request.param)
    yield chat
    assert chat.num_ended == len(chat.heard), "no request is left"


def twin(chat: SlowChat) -> SlowChat:
    return make_chat(hears=chat.asr_stage is None)


def test_silence_that_lasts_has_the_answer_that_was_begun(chat: SlowChat) -> None:
    """It was complete before the turn has ended. All events are those that come without, in their order."""
    app = session_app(chat)

    async def main(session: Session) -> Any:
        turns = []
        for number in (1, 2):  # The second one reads the first.
            await hear(session)
            await pause(session)
            await wait_until(lambda number=number: chat.num_complete == number)
            await is_unseen(session)
            turns.append(as_json(await stop(session)))
        return turns

    async def main_without(session: Session) -> Any:
        turns = []
        for _ in range(2):
            await hear(session)
            await pause(session)
            await is_unseen(session)
            turns.append(as_json(await stop(session)))
        return turns

    assert converse(app, main, model=MODEL, manual=False) == without_speculation(other := twin(chat), main_without)
    assert chat.heard == other.heard and len(chat.heard) == 2
    assert counts_of(app) == (2, 2, 0)


def test_a_model_hears_a_turn_up_to_its_last_pause() -> None:
    """With or without; the item has all of it."""

    async def main(session: Session) -> int:
        await hear(session)
        await pause(session)
        events = await stop(session)
        item_id = next(event.item_id for event in events if event.type == "input_audio_buffer.committed")
        await session.connection.conversation.item.retrieve(item_id=item_id)
        return len((await session.until("conversation.item.retrieved"))[-1].item.content[0].audio)

    chat = make_chat(hears=True)
    app = session_app(chat)
    num_bytes = converse(app, main, model=MODEL, manual=False)
    assert num_bytes == 2 * (len(SPEECH) + 3 * len(PAUSE)) * 4 // 3
    assert without_speculation(other := make_chat(hears=True), main) == num_bytes
    assert chat.heard == other.heard == [[len(SPEECH) + len(PAUSE)]]
    assert sessions_of(app).budget.num_bytes == 0


def test_speech_that_goes_on_drops_the_answer(chat: SlowChat) -> None:
    app = session_app(chat)

    async def main(session: Session) -> Any:
        await hear(session)
        await pause(session)
        if chat_of_main is chat:
            await wait_until(lambda: chat.num_complete == 1)
        await is_unseen(session)
        await pause(session)
        return as_json(await stop(session))

    chat_of_main = chat
    with_it = converse(app, main, model=MODEL, manual=False)
    assert counts_of(app) == (2, 1, 5), "the tokens of the first one"
    chat_of_main = other = twin(chat)
    assert with_it == without_speculation(other, main)
    assert [chat.heard[-1]] == other.heard and len(chat.heard) == 2


def test_an_answer_that_still_runs_is_aborted_when_speech_goes_on() -> None:
    chat = make_chat(hears=True)
    chat.may_end = False
    app = session_app(chat)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: chat.num_begun == 1)
        await send(session, SPEECH)
        await wait_until(lambda: chat.num_ended == 1)
        chat.may_end = True
        await send(session, PAUSE)
        assert (await stop(session))[-1].response.status == "completed"

    converse(app, main, model=MODEL, manual=False)
    assert (chat.num_complete, counts_of(app)) == (1, (2, 1, 0))


async def new_instructions(session: Session, item_id: str) -> None:
    await session.configure(instructions="Be brief.")


async def add_an_item(session: Session, item_id: str) -> None:
    await session.say("Listen:")


async def delete_an_item(session: Session, item_id: str) -> None:
    await session.connection.conversation.item.delete(item_id=item_id)
    await session.until("conversation.item.deleted")


async def truncate_the_answer(session: Session, item_id: str) -> None:
    (message,) = [e.item for e in session.events if e.type == "conversation.item.done" and e.item.role == "assistant"]
    connection = session.connection
    await connection.conversation.item.truncate(item_id=message.id, content_index=0, audio_end_ms=100)
    await session.until("conversation.item.truncated")


CHANGES = (new_instructions, add_an_item, delete_an_item, truncate_the_answer)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_before_the_end_of_the_turn_is_in_its_answer(
    chat: SlowChat, change: Callable[[Session, str], Any]
) -> None:
    app = session_app(chat)

    async def main(session: Session) -> Any:
        await hear(session)
        first = await session.say("One.")
        await session.respond()
        await pause(session)
        await session.until("input_audio_buffer.speech_started")
        if chat_of_main is chat:
            await wait_until(lambda: chat.num_complete == 2)
        await change(session, first.id)
        return as_json(await stop(session))

    chat_of_main = chat
    with_it = converse(app, main, model=MODEL, manual=False)
    assert counts_of(app) == (1, 0, 5)
    chat_of_main = other = twin(chat)
    assert with_it == without_speculation(other, main)
    assert chat.heard[-1] == other.heard[-1] and chat.requests[-1].messages != chat.requests[-2].messages


def test_a_change_that_was_undone_does_not_matter() -> None:
    chat = make_chat(hears=True)
    app = session_app(chat)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await session.until("input_audio_buffer.speech_started")
        item = await session.say("Listen:")
        await delete_an_item(session, item.id)
        await session.configure(instructions="Be brief.")
        await session.configure(instructions="")
        await stop(session)

    converse(app, main, model=MODEL, manual=False)
    assert counts_of(app) == (1, 1, 0)


@pytest.mark.parametrize("end", ["commit", "clear", "no turn detection"])
def test_a_client_that_ends_the_turn_itself(end: str) -> None:
    """The answer that was begun is not sent; the next turn has its own."""
    chat = make_chat(hears=True)
    app = session_app(chat)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: chat.num_complete == 1)
        await is_unseen(session)
        if end == "commit":
            await session.connection.input_audio_buffer.commit()
            await session.until("conversation.item.done")
        elif end == "clear":
            await session.connection.input_audio_buffer.clear()
            await session.until("input_audio_buffer.cleared")
        else:
            await session.configure(audio={"input": {"turn_detection": None}})
            await hear(session)
        await pause(session)
        events = await stop(session)
        assert types_of(events).count("response.created") == 1

    converse(app, main, model=MODEL, manual=False)
    # After `commit` speech goes on in a turn that has been committed in part.
    assert counts_of(app) == ((1, 0, 5) if end == "commit" else (2, 1, 5)) and len(chat.heard) == 2


def test_a_client_cannot_cancel_what_it_does_not_know() -> None:
    """The answer comes; then it can."""
    chat = make_chat(hears=True)
    chat.may_end = False
    app = session_app(chat)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: chat.num_begun == 1)
        await is_unseen(session)
        await session.connection.response.cancel()
        assert (await session.error()).code == "response_cancel_not_active"
        await send(session, np.concatenate([PAUSE, PAUSE]))
        await session.until("response.output_audio_transcript.delta")
        await session.connection.response.cancel()
        events = await session.until("response.done")
        assert events[-1].response.status == "cancelled"
        assert events[-1].response.status_details.reason == "client_cancelled"

    converse(app, main, model=MODEL, manual=False)
    assert (chat.num_ended, counts_of(app)) == (1, (1, 1, 0))


def test_a_client_that_disconnects_leaves_nothing() -> None:
    chat = make_chat(hears=True)
    chat.may_end = False
    app = session_app(chat)

    async def main(url: str) -> None:
        async with opened(url, model=MODEL, manual=False) as session:
            await hear(session)
            await pause(session)
            await wait_until(lambda: chat.num_begun == 1)
            assert sessions_of(app).budget.num_bytes > MAX_UNSENT_BYTES, "what the answer may hold is counted"
        await wait_until(lambda: chat.num_ended == 1)
        await wait_until(lambda: gc.collect() >= 0 and sessions_of(app).budget.num_bytes == 0)

    with over_http(app) as url:
        asyncio.run(main(url))
    assert counts_of(app) == (1, 0, 0)


def call_a_tool(messages: list[Any]) -> list[ChatDelta]:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "dive", "arguments": "{}"}}
    return [ChatDelta(tool_calls=[call])]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_tool_is_called_once_the_turn_has_ended(goes_on: bool) -> None:
    chat = make_chat(hears=True)
    chat.answer = call_a_tool
    tool = {"type": "function", "name": "dive", "parameters": {"type": "object"}}

    async def main(session: Session) -> Any:
        await hear(session, tools=[tool])
        await pause(session)
        if chat_of_main is chat:
            await wait_until(lambda: chat.num_complete == 1)
        await is_unseen(session)
        if goes_on:
            await pause(session)
        return as_json(await stop(session))

    chat_of_main, app = chat, session_app(chat)
    with_it = converse(app, main, model=MODEL, manual=False)
    assert counts_of(app) == ((2, 1, 5) if goes_on else (1, 1, 0))
    assert [event["type"] for event in with_it].count("response.function_call_arguments.done") == 1
    chat_of_main = other = make_chat(hears=True)
    other.answer = call_a_tool
    assert with_it == without_speculation(other, main)


def test_two_sessions_and_one_place() -> None:
    """The other one is answered when its turn has ended; the place is free again once the first is promoted."""
    chat = make_chat(hears=True)
    chat.may_end = False
    app = session_app(chat, max_realtime_speculative_responses=1)

    async def main(url: str) -> None:
        opening = [opened(url, model=MODEL, manual=False) for _ in range(2)]
        async with opening[0] as first, opening[1] as second:
            for session in (first, second):
                await hear(session)
            await pause(first, SPEECH)
            await wait_until(lambda: chat.num_begun == 1)
            await pause(second, np.tile(SPEECH, 2))
            await is_unseen(second)
            assert counts_of(app)[0] == 1
            chat.may_end = True
            ends = await asyncio.gather(stop(first), stop(second))
            assert [end[-1].response.status for end in ends] == ["completed"] * 2
            await pause(second)
            await stop(second)

    with over_http(app) as url:
        asyncio.run(main(url))
    assert counts_of(app) == (2, 2, 0)
    assert chat.heard == [[14_400], [26_400], [26_400, 14_400]]


def test_two_sessions_at_once(chat: SlowChat) -> None:
    """Each gets its own."""
    chat.answer = lambda messages: [ChatDelta(text=f"{messages[0]['content']}!"), ChatDelta(speech=TONE)]
    app = session_app(chat)

    async def main(url: str) -> None:
        opening = [opened(url, model=MODEL, manual=False) for _ in range(2)]
        async with opening[0] as first, opening[1] as second:
            for name, session in (("Ann", first), ("Bob", second)):
                await hear(session, instructions=name)
                await pause(session)
            await wait_until(lambda: chat.num_complete == 2)
            for name, session in (("Bob", second), ("Ann", first)):
                response = (await stop(session))[-1].response
                assert response.output[0].content[0].transcript == f"{name}!"

    with over_http(app) as url:
        asyncio.run(main(url))
    assert counts_of(app) == (2, 2, 0)


def test_no_answer_is_begun_while_requests_wait(chat: SlowChat) -> None:
    app = session_app(chat)
    chat.client.has_idle_room = lambda: False

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await is_unseen(session)
        assert not chat.heard
        assert (await stop(session))[-1].response.status == "completed"

    converse(app, main, model=MODEL, manual=False)
    assert counts_of(app) == (0, 0, 0) and len(chat.heard) == 1


def test_no_answer_is_begun_without_memory_for_it(chat: SlowChat) -> None:
    app = session_app(chat, max_client_realtime_bytes=24 << 20, max_total_realtime_bytes=24 << 20)
    budget = sessions_of(app).budget

    async def main(session: Session) -> None:
        await hear(session)
        await send(session, SPEECH)
        await is_unseen(session)  # All of it has been heard.
        full = budget.share("another client")
        full.set((24 << 20) - budget.num_bytes - 16_000)
        await send(session, PAUSE)
        await session.connection.conversation.item.retrieve(item_id="none")
        await session.error()
        full.release()
        assert (await stop(session))[-1].response.status == "completed"

    converse(app, main, model=MODEL, manual=False)
    assert counts_of(app) == (0, 0, 0) and len(chat.heard) == 1


def test_no_answer_is_begun_beside_another_or_where_none_is_wanted() -> None:
    chat = make_chat(hears=True)
    chat.may_end = False
    app = session_app(chat)

    async def main(session: Session) -> None:
        await session.configure(
            audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}}
        )
        await session.say("Hello.")
        await session.connection.response.create()
        await wait_until(lambda: chat.num_begun == 1)
        await pause(session)
        await session.until("input_audio_buffer.speech_started")
        await session.configure(instructions="A marker.")
        chat.may_end = True
        await session.until("response.done")
        await send(session, np.concatenate([PAUSE, PAUSE]))
        await session.until("response.done")
        await session.configure(audio={"input": {"turn_detection": {"type": "server_vad", "create_response": False}}})
        await pause(session)
        await send(session, np.concatenate([PAUSE, PAUSE]))
        await session.until("conversation.item.done")

    converse(app, main, model=MODEL, manual=False)
    assert counts_of(app) == (0, 0, 0) and len(chat.heard) == 2


def test_an_answer_that_failed_is_made_again(chat: SlowChat) -> None:
    """A new one may not fail."""
    chat.error = ValueError("not now")
    app = session_app(chat)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: len(chat.heard) == 1)
        await is_unseen(session)
        assert (await stop(session))[-1].response.status == "completed"

    converse(app, main, model=MODEL, manual=False)
    chat.num_ended += 1  # The one that failed has no stream.
    assert counts_of(app) == (1, 0, 0) and len(chat.heard) == 2


def test_an_answer_does_not_wait_for_a_client_that_sends_no_more_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends; the turn has a new one when it ends."""
    monkeypatch.setattr(response_module, "_MAX_SPECULATIVE_S", 0.1)
    chat = make_chat(hears=True)
    chat.may_end = False
    app = session_app(chat)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: chat.num_ended == 1)
        chat.may_end = True
        assert (await stop(session))[-1].response.status == "completed"

    converse(app, main, model=MODEL, manual=False)
    assert (chat.num_complete, counts_of(app)) == (1, (1, 0, 0))


def test_a_long_answer_is_not_made_far_ahead() -> None:
    """At most what any answer may be ahead of what was sent; all of it comes."""
    chat = make_chat(hears=True)
    piece, num_read = "x" * (MAX_UNSENT_BYTES // 8), 0

    def answer(messages: list[Any]) -> list[ChatDelta]:
        class Counted(list[ChatDelta]):
            def __iter__(self) -> Iterator[ChatDelta]:
                nonlocal num_read
                for _ in range(40):
                    num_read += 1
                    yield ChatDelta(text=piece)

        return Counted()

    chat.answer = answer
    app = session_app(chat)

    async def main(session: Session) -> None:
        await hear(session, output_modalities=["text"])
        await pause(session)
        await wait_until(lambda: num_read >= 8)
        await session.configure(instructions="")  # The server's loop has turned since.
        assert num_read <= 10
        response = (await stop(session))[-1].response
        assert response.output[0].content[0].text == piece * 40

    converse(app, main, model=MODEL, manual=False)
    assert counts_of(app) == (1, 1, 0)


def test_a_noise_is_not_answered() -> None:
    """The ASR stage finds no words."""
    chat = make_chat(hears=False)
    app = session_app(chat)

    async def main(session: Session) -> None:
        await hear(session)
        await send(session, np.concatenate([SPEECH // 1000, PAUSE, PAUSE, PAUSE]))
        await session.until("conversation.item.done")
        await pause(session)
        assert types_of(await stop(session)).count("response.created") == 1

    converse(app, main, model=MODEL, manual=False)
    assert chat.heard == [["", "It is 0.5."]]
    assert counts_of(app)[1:] == (1, 0)


def test_all_in_one_piece(chat: SlowChat) -> None:
    """A client that sends a recording: the turn ends while its answer is begun."""
    app = session_app(chat)

    async def main(session: Session) -> Any:
        await hear(session)
        sound = np.concatenate([SPEECH, PAUSE, SPEECH, PAUSE, PAUSE, PAUSE])
        await session.connection.input_audio_buffer.append(audio=base64.b64encode(sound.tobytes()).decode())
        return as_json(await session.until("response.done"))

    assert converse(app, main, model=MODEL, manual=False) == without_speculation(twin(chat), main)
    assert counts_of(app) == (2, 1, 0)
