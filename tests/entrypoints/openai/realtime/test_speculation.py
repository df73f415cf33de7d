# SPDX-License-Identifier: Apache-2.0
"""Answers that are begun at a pause: what the client gets is what it gets without, and nothing before its turn ends."""

import asyncio
import base64
import gc
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.realtime.fake_chat import MODEL, TONE, FakeChat, session_app
from tests.entrypoints.openai.realtime.level_detector import PausingDetector
from tests.entrypoints.openai.realtime.sessions import Session, converse, opened, types_of, visit
from tests.entrypoints.openai.realtime.test_turns import send
from vllm_omni.entrypoints.openai.realtime import response as response_module
from vllm_omni.entrypoints.openai.realtime.session_budget import SessionBudget
from vllm_omni.entrypoints.openai.streamed_chat import MAX_UNSENT_BYTES, ChatDelta
from vllm_omni.metrics.stats import SpeculationCounts

SPEECH = np.full(12_000, 16_384, "<i2")
"""Half a second at 24 kHz."""
PAUSE = np.zeros(2400, "<i2")
"""100 ms, which are a pause; three of them end a turn."""
HEARING: Any = {"turn_detection": {"type": "server_vad"}}
TIMEOUT_S = 120
_ID = re.compile(r"\b(?:event|item|resp|conv|call)_[0-9a-f]{8,}")

Begun = Callable[[int], Awaitable[None]]
"""Waits until so many answers are complete; not in a session where none is begun at the pause."""


@pytest.fixture(autouse=True)
def pausing_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.entrypoints.openai.realtime.session.TurnDetector", PausingDetector)
    monkeypatch.setattr("vllm_omni.entrypoints.openai.realtime.turn_detection.is_installed", lambda: True)


def answer_by_length(messages: list[Any]) -> list[ChatDelta]:
    return [ChatDelta(text=f"Message {len(messages)} is "), ChatDelta(text="heard."), *[ChatDelta(speech=TONE)] * 3]


def make_chat(*, hears: bool = True, may_end: bool = True) -> FakeChat:
    chat = FakeChat(hears=hears)
    chat.answer, chat.may_end = answer_by_length, may_end
    return chat


@pytest.fixture(params=[True, False], ids=["hears", "reads"])
def chat(request: pytest.FixtureRequest) -> Iterator[FakeChat]:
    """An omni model, or one with an ASR stage."""
    chat = make_chat(hears=request.param)
    yield chat
    assert chat.num_ended == len(chat.heard), "no request is left"


@pytest.fixture
def omni() -> FakeChat:
    return make_chat()


@pytest.fixture
def slow() -> FakeChat:
    """An omni model whose answers wait after their first deltas."""
    return make_chat(may_end=False)


def budget_of(app: FastAPI) -> SessionBudget:
    budget: SessionBudget = app.state.omni_sessions.budget
    return budget


def counts_of(app: FastAPI) -> tuple[int, int, int]:
    counts: SpeculationCounts = app.state.omni_realtime.speculations.counts
    return counts.started, counts.promoted, counts.wasted_tokens


def run(app: FastAPI, main: Callable[[Session], Awaitable[Any]]) -> Any:
    return converse(app, main, model=MODEL, manual=False)


def compare(chat: FakeChat, main: Callable[[Session, Begun], Awaitable[Any]]) -> tuple[tuple[int, int, int], FakeChat]:
    """Runs it in a session with answers that are begun at the pause, and without: it must return the same.

    Returns:
        The counts of these, and the chat of the session without.
    """
    app = session_app(chat)

    async def begun(number: int) -> None:
        await wait_until(lambda: chat.num_complete == number)

    async def nothing_is_begun(number: int) -> None: ...

    result = run(app, lambda session: main(session, begun))
    other = make_chat(hears=chat.asr_stage is None)
    other.answer = chat.answer
    waiting = session_app(other, max_realtime_speculative_responses=0)
    assert result == run(waiting, lambda session: main(session, nothing_is_begun))
    assert counts_of(waiting) == (0, 0, 0)
    return counts_of(app), other


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


async def end_turn(session: Session) -> None:
    """Stays silent after a pause."""
    await send(session, np.concatenate([PAUSE, PAUSE]))


async def stop(session: Session) -> list[Any]:
    """The events of the turn's end and its answer."""
    await end_turn(session)
    return await session.until("response.done")


def as_json(events: list[Any]) -> list[Any]:
    """Events with their ids numbered as they come."""
    ids: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return ids.setdefault(match[0], f"id {len(ids)}")

    return [json.loads(_ID.sub(number, event.model_dump_json(exclude={"event_id"}))) for event in events]


def test_silence_that_lasts_has_the_answer_that_was_begun(chat: FakeChat) -> None:
    """It was complete before the turn has ended. All events are those that come without, in their order."""

    async def main(session: Session, begun: Begun) -> Any:
        turns = []
        for number in (1, 2):  # The second one reads the first.
            await hear(session)
            await pause(session)
            await begun(number)
            await is_unseen(session)
            turns.append(as_json(await stop(session)))
        return turns

    counts, other = compare(chat, main)
    assert chat.heard == other.heard and len(chat.heard) == 2
    assert counts == (2, 2, 0)


def test_a_model_hears_a_turn_up_to_its_last_pause(omni: FakeChat) -> None:
    """With or without; the item has all of it."""

    async def main(session: Session, begun: Begun) -> int:
        await hear(session)
        await pause(session)
        events = await stop(session)
        item_id = next(event.item_id for event in events if event.type == "input_audio_buffer.committed")
        item = await session.retrieve(item_id)
        assert len(base64.b64decode(item.content[0].audio)) == 2 * (len(SPEECH) + 3 * len(PAUSE))
        return len(events)

    _, other = compare(omni, main)
    assert omni.heard == other.heard == [[len(SPEECH) + len(PAUSE)]]


def test_speech_that_goes_on_drops_the_answer(chat: FakeChat) -> None:
    async def main(session: Session, begun: Begun) -> Any:
        await hear(session)
        await pause(session)
        await begun(1)
        await is_unseen(session)
        await pause(session)
        return as_json(await stop(session))

    counts, other = compare(chat, main)
    assert counts == (2, 1, 5), "the tokens of the first one"
    assert [chat.heard[-1]] == other.heard and len(chat.heard) == 2


def test_an_answer_that_still_runs_is_aborted_when_speech_goes_on(slow: FakeChat) -> None:
    app = session_app(slow)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: slow.num_begun == 1)
        await send(session, SPEECH)
        await wait_until(lambda: slow.num_ended == 1)
        slow.may_end = True
        await send(session, PAUSE)
        assert (await stop(session))[-1].response.status == "completed"

    run(app, main)
    assert (slow.num_complete, counts_of(app)) == (1, (2, 1, 0))


async def new_instructions(session: Session, item_id: str) -> None:
    await session.configure(instructions="Be brief.")


async def add_an_item(session: Session, item_id: str) -> None:
    await session.say("Listen:")


async def truncate_the_answer(session: Session, item_id: str) -> None:
    (message,) = [e.item for e in session.events if e.type == "conversation.item.done" and e.item.role == "assistant"]
    await session.truncate(message.id, 100)


CHANGES = (new_instructions, add_an_item, Session.delete, truncate_the_answer)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_before_the_end_of_the_turn_is_in_its_answer(
    chat: FakeChat, change: Callable[[Session, str], Awaitable[None]]
) -> None:
    async def main(session: Session, begun: Begun) -> Any:
        await hear(session)
        first = await session.say("One.")
        await session.respond()
        await pause(session)
        await session.until("input_audio_buffer.speech_started")
        await begun(2)
        await change(session, first.id)
        return as_json(await stop(session))

    counts, other = compare(chat, main)
    assert counts == (1, 0, 5)
    assert chat.heard[-1] == other.heard[-1] and chat.requests[-1].messages != chat.requests[-2].messages


def test_a_change_that_was_undone_does_not_matter(omni: FakeChat) -> None:
    app = session_app(omni)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await session.until("input_audio_buffer.speech_started")
        item = await session.say("Listen:")
        await session.delete(item.id)
        await session.configure(instructions="Be brief.")
        await session.configure(instructions="")
        await stop(session)

    run(app, main)
    assert counts_of(app) == (1, 1, 0)


@pytest.mark.parametrize("end", ["commit", "clear", "no turn detection"])
def test_a_client_that_ends_the_turn_itself(omni: FakeChat, end: str) -> None:
    """The answer that was begun is not sent; the next turn has its own."""
    app = session_app(omni)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: omni.num_complete == 1)
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
        assert types_of(await stop(session)).count("response.created") == 1

    run(app, main)
    # After `commit` speech goes on in a turn that has been committed in part.
    assert counts_of(app) == ((1, 0, 5) if end == "commit" else (2, 1, 5)) and len(omni.heard) == 2


def test_a_client_cannot_cancel_what_it_does_not_know(slow: FakeChat) -> None:
    """The answer comes; then it can."""
    app = session_app(slow)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: slow.num_begun == 1)
        await is_unseen(session)
        await session.connection.response.cancel()
        assert (await session.error()).code == "response_cancel_not_active"
        await end_turn(session)
        await session.until("response.output_audio_transcript.delta")
        await session.connection.response.cancel()
        response = (await session.until("response.done"))[-1].response
        assert response.status == "cancelled" and response.status_details.reason == "client_cancelled"

    run(app, main)
    assert (slow.num_ended, counts_of(app)) == (1, (1, 1, 0))


def test_a_client_that_disconnects_leaves_nothing(slow: FakeChat) -> None:
    app = session_app(slow)
    budget = budget_of(app)

    async def main(url: str) -> None:
        async with opened(url, model=MODEL, manual=False) as session:
            await hear(session)
            await pause(session)
            await wait_until(lambda: slow.num_begun == 1)
            assert budget.num_bytes > MAX_UNSENT_BYTES, "what the answer may hold is counted"
        await wait_until(lambda: slow.num_ended == 1)
        await wait_until(lambda: gc.collect() >= 0 and budget.num_bytes == 0)

    visit(app, main)
    assert counts_of(app) == (1, 0, 0)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_tool_is_called_once_the_turn_has_ended(omni: FakeChat, goes_on: bool) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "dive", "arguments": "{}"}}
    omni.answer = lambda messages: [ChatDelta(tool_calls=[call])]
    tool = {"type": "function", "name": "dive", "parameters": {"type": "object"}}

    async def main(session: Session, begun: Begun) -> Any:
        await hear(session, tools=[tool])
        await pause(session)
        await begun(1)
        await is_unseen(session)
        if goes_on:
            await pause(session)
        events = as_json(await stop(session))
        assert [event["type"] for event in events].count("response.function_call_arguments.done") == 1
        return events

    assert compare(omni, main)[0] == ((2, 1, 5) if goes_on else (1, 1, 0))


def test_two_sessions_and_one_place(slow: FakeChat) -> None:
    """The other one is answered when its turn has ended; the place is free again once the first is promoted."""
    app = session_app(slow, max_realtime_speculative_responses=1)

    async def main(url: str) -> None:
        opening = [opened(url, model=MODEL, manual=False) for _ in range(2)]
        async with opening[0] as first, opening[1] as second:
            for session in (first, second):
                await hear(session)
            await pause(first, SPEECH)
            await wait_until(lambda: slow.num_begun == 1)
            await pause(second, np.tile(SPEECH, 2))
            await is_unseen(second)
            assert counts_of(app)[0] == 1
            slow.may_end = True
            ends = await asyncio.gather(stop(first), stop(second))
            assert [end[-1].response.status for end in ends] == ["completed"] * 2
            await pause(second)
            await stop(second)

    visit(app, main)
    assert counts_of(app) == (2, 2, 0)
    assert slow.heard == [[14_400], [26_400], [26_400, 14_400]]


def test_two_sessions_at_once(chat: FakeChat) -> None:
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

    visit(app, main)
    assert counts_of(app) == (2, 2, 0)


def test_no_answer_is_begun_while_requests_wait(chat: FakeChat) -> None:
    app = session_app(chat)
    chat.client.has_idle_room = lambda: False

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await is_unseen(session)
        assert not chat.heard
        assert (await stop(session))[-1].response.status == "completed"

    run(app, main)
    assert counts_of(app) == (0, 0, 0) and len(chat.heard) == 1


def test_no_answer_is_begun_without_memory_for_it(chat: FakeChat) -> None:
    app = session_app(chat, max_client_realtime_bytes=24 << 20, max_total_realtime_bytes=24 << 20)
    budget = budget_of(app)

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

    run(app, main)
    assert counts_of(app) == (0, 0, 0) and len(chat.heard) == 1


def test_no_answer_is_begun_beside_another_or_where_none_is_wanted(slow: FakeChat) -> None:
    app = session_app(slow)

    async def detect(session: Session, **settings: bool) -> None:
        await session.configure(audio={"input": {"turn_detection": {"type": "server_vad", **settings}}})

    async def main(session: Session) -> None:
        await detect(session, interrupt_response=False)
        await session.say("Hello.")
        await session.connection.response.create()
        await wait_until(lambda: slow.num_begun == 1)
        await pause(session)
        await session.until("input_audio_buffer.speech_started")
        await session.configure(instructions="A marker.")
        slow.may_end = True
        await session.until("response.done")
        await stop(session)
        await detect(session, create_response=False)
        await pause(session)
        await end_turn(session)
        await session.until("conversation.item.done")
        await session.say("The end.")
        assert types_of(session.events).count("response.created") == 2

    run(app, main)
    assert counts_of(app) == (0, 0, 0) and len(slow.heard) == 2


def test_an_answer_that_failed_is_made_again(chat: FakeChat) -> None:
    """A new one may not fail."""
    chat.error = ValueError("not now")
    app = session_app(chat)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: len(chat.heard) == 1)
        await is_unseen(session)
        assert (await stop(session))[-1].response.status == "completed"

    run(app, main)
    chat.num_ended += 1  # The one that failed has no stream.
    assert counts_of(app) == (1, 0, 0) and len(chat.heard) == 2


def test_an_answer_does_not_wait_for_a_client_that_sends_no_more_sound(
    slow: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request ends; the turn has a new one when it ends."""
    monkeypatch.setattr(response_module, "MAX_SPECULATIVE_S", 0.1)
    app = session_app(slow)

    async def main(session: Session) -> None:
        await hear(session)
        await pause(session)
        await wait_until(lambda: slow.num_ended == 1)
        slow.may_end = True
        assert (await stop(session))[-1].response.status == "completed"

    run(app, main)
    assert (slow.num_complete, counts_of(app)) == (1, (1, 0, 0))


def test_a_long_answer_is_not_made_far_ahead(omni: FakeChat) -> None:
    """At most what any answer may be ahead of what was sent; all of it comes."""
    piece, num_read = "x" * (MAX_UNSENT_BYTES // 8), 0

    def answer(messages: list[Any]) -> Iterator[ChatDelta]:
        nonlocal num_read
        for _ in range(40):
            num_read += 1
            yield ChatDelta(text=piece)

    omni.answer = answer
    app = session_app(omni)

    async def main(session: Session) -> None:
        await hear(session, output_modalities=["text"])
        await pause(session)
        await wait_until(lambda: num_read >= 8)
        await session.configure(instructions="")  # The server's loop has turned since.
        assert num_read <= 10
        response = (await stop(session))[-1].response
        assert response.output[0].content[0].text == piece * 40

    run(app, main)
    assert counts_of(app) == (1, 1, 0)


def test_a_noise_is_not_answered() -> None:
    """The ASR stage finds no words. A client that asks for a response itself has it."""
    chat = make_chat(hears=False)
    app = session_app(chat)
    noise = np.concatenate([SPEECH // 1000, PAUSE, PAUSE, PAUSE])

    async def main(session: Session) -> None:
        await hear(session)
        await send(session, noise)
        await session.until("conversation.item.done")
        await pause(session)
        assert types_of(await stop(session)).count("response.created") == 1
        await send(session, noise)
        await session.until("input_audio_buffer.committed")
        assert (await session.respond())[-1].response.status == "completed"

    run(app, main)
    assert chat.heard == [["", "It is 0.5."], ["", "It is 0.5.", ""]]
    assert counts_of(app)[1:] == (1, 0)


def test_all_in_one_piece(chat: FakeChat) -> None:
    """A client that sends a recording: the turn ends while its answer is begun."""

    async def main(session: Session, begun: Begun) -> Any:
        await hear(session)
        sound = np.concatenate([SPEECH, PAUSE, SPEECH, PAUSE, PAUSE, PAUSE])
        await session.connection.input_audio_buffer.append(audio=base64.b64encode(sound.tobytes()).decode())
        return as_json(await session.until("response.done"))

    assert compare(chat, main)[0] == (2, 1, 0)
