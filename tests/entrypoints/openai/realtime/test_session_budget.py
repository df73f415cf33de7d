# SPDX-License-Identifier: Apache-2.0
"""What sessions hold, in bytes: of one client, and of all."""

import asyncio
import json
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import websockets

from tests.entrypoints.openai.realtime.fake_chat import FakeChat, session_app
from tests.entrypoints.openai.realtime.sessions import Session, converse, opened, visit
from tests.entrypoints.openai.realtime.test_limits import SECOND
from vllm_omni.entrypoints.openai.http_protocol import web_socket_protocol
from vllm_omni.entrypoints.openai.realtime.audio import FORMATS
from vllm_omni.entrypoints.openai.realtime.conversation import Item, Sound
from vllm_omni.entrypoints.openai.realtime.session_budget import SessionBudget
from vllm_omni.entrypoints.openai.server_args import RealtimeLimits
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta
from vllm_omni.errors import PipelineFullError

MIB = 1 << 20
LIMITS: dict[str, Any] = {"max_total_realtime_bytes": 8 * MIB, "max_client_realtime_bytes": 4 * MIB}


def test_a_client_and_all_have_limits() -> None:
    budget = SessionBudget(RealtimeLimits(max_total_realtime_bytes=100))
    share, other, third = (budget.share(client) for client in (b"one", b"other", b"third"))
    share.set(50)
    with pytest.raises(PipelineFullError, match="--max-client-realtime-bytes"):
        share.set(51)
    assert share.num_bytes == budget.num_bytes == 50
    other.set(50)
    with pytest.raises(PipelineFullError, match="--max-total-realtime-bytes"):
        third.set(1)
    share.set(10)
    third.set(40)
    for each in (share, other, third):
        each.release()
    assert budget.num_bytes == 0


def test_an_item_counts_until_nobody_reads_it() -> None:
    budget = SessionBudget(RealtimeLimits())
    data = {"id": "a", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * 10_000}]}
    item = Item(data, {1: Sound(np.zeros(5000, np.int16), FORMATS["audio/pcm"])})
    item.count(partial(budget.share, b"one"))
    assert 20_000 < budget.num_bytes < 25_000
    item.data["content"][0]["text"] += "é" * 10_000
    item.count_texts()
    assert budget.num_bytes > 30_000
    reader = item.sounds[1].decoded
    del item
    assert budget.num_bytes == 10_000, "a response hears the sound"
    del reader
    assert budget.num_bytes == 0


async def errors_so_far(session: Session) -> set[str]:
    """The codes of the errors to all that was sent, which is answered in its order."""
    await session.connection.conversation.item.retrieve(item_id="none")
    codes = set()
    while (code := (await session.error()).code) != "item_retrieve_invalid_item_id":
        codes.add(code)
    return codes


def texts_of(session: Session, size: int) -> Any:
    return session.create({"type": "input_text", "text": "x" * size})


def test_items_and_sound_of_one_client_leave_room_for_another() -> None:
    app = session_app(FakeChat(), api_key=["one", "other"], **LIMITS)

    async def main(url: str) -> None:
        async with opened(url, key="one", model="fake") as first, opened(url, key="one", model="fake") as second:
            for session in (first, second):
                item = await session.say("x" * MIB)
            await texts_of(second, MIB)  # While it is read it takes as much again.
            error = await second.error()
            assert error.code == "memory_limit_exceeded" and "--max-client-realtime-bytes" in error.message
            await second.connection.input_audio_buffer.append(audio=SECOND)
            assert await errors_so_far(second) == set()
            for _ in range(50):
                await first.connection.input_audio_buffer.append(audio=SECOND)
            assert await errors_so_far(first) == {"memory_limit_exceeded"}
            async with opened(url, key="other", model="fake") as other:
                await other.say("x" * MIB)
                await other.say("Hello")
                assert (await other.respond())[-1].response.status == "completed"
            await second.delete(item.id)
            await second.connection.input_audio_buffer.commit()
            await second.until("conversation.item.done")
            await second.say("x" * (MIB // 2))
        deadline = time.monotonic() + 60
        async with opened(url, key="one", model="fake") as session:
            await texts_of(session, MIB)
            while (await session.next()).type == "error":  # The server has not noticed that the others have ended.
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
                await texts_of(session, MIB)

    visit(app, main)


def test_an_answer_that_takes_too_much_fails_alone() -> None:
    chat = FakeChat()
    chat.answer = lambda _: [ChatDelta(text="x" * (MIB // 4))] * 40

    async def main(session: Session) -> None:
        await session.say("Hello")
        done = (await session.respond(output_modalities=["text"]))[-1].response
        assert done.status == "failed" and "--max-client-realtime-bytes" in done.status_details.error.message
        chat.answer = lambda _: [ChatDelta(text="Yes.")]
        await session.delete(done.output[0].id)
        assert (await session.respond(output_modalities=["text"]))[-1].response.status == "completed"

    converse(session_app(chat, **LIMITS), main, model="fake")


def test_messages_that_are_still_arriving_count() -> None:
    app = session_app(FakeChat(), **LIMITS)

    async def main(url: str) -> None:
        async with opened(url, model="fake") as session:
            address = f"{url.replace('http', 'ws')}/v1/realtime?model=fake"
            async with websockets.connect(address, max_size=None, compression=None) as client:
                await client.recv()
                goes_on = asyncio.Event()

                async def parts() -> Any:
                    for _ in range(5):
                        yield "x" * MIB
                    await goes_on.wait()

                sending = asyncio.create_task(client.send(parts()))
                await client.wait_closed()
                goes_on.set()
                await asyncio.gather(sending, return_exceptions=True)
            await session.say("Hello")
            async with websockets.connect(address, max_size=None, compression=None) as client:
                # One that is decoded, one that is counted as it comes, and its sound are less than the limit.
                event = {"type": "input_audio_buffer.append", "audio": SECOND * 10}
                for _ in range(12):  # Together they are nearly twice the limit.
                    await client.send(json.dumps(event))
                    await client.send(json.dumps({"type": "input_audio_buffer.clear"}))
                while "cleared" not in str(await client.recv()):
                    pass

    visit(app, main, ws=web_socket_protocol(60))
