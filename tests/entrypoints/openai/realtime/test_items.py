# SPDX-License-Identifier: Apache-2.0
"""What a session accepts can be read by every response that follows; what cannot be read is refused."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.entrypoints.openai.media_apps import png
from tests.entrypoints.openai.realtime.fake_chat import MAX_PARTS, MODEL, TONE, FakeChat, session_app
from tests.entrypoints.openai.realtime.sessions import Session, converse
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta

PICTURE = "data:image/png;base64," + base64.b64encode(png(8, 8)).decode()
SOUND = np.arange(4800, dtype="<i2").tobytes()


def image(url: str) -> Any:
    return {"type": "input_image", "image_url": url}


async def sound_of(session: Session, item: Any) -> bytes:
    await session.connection.conversation.item.retrieve(item_id=item.id)
    return base64.b64decode((await session.until("conversation.item.retrieved"))[-1].item.content[0].audio)


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64,AAAA", PICTURE[:-40], "data:,", "x", "file:///etc/hostname"],
    ids=["no picture", "cut", "empty", "no address", "local"],
)
def test_a_broken_picture_is_refused(url: str) -> None:
    async def main(session: Session) -> None:
        await session.create({"type": "input_text", "text": "a"}, image(url))
        error = await session.error()
        assert error.param == "item.content[1].image_url" and error.type == "invalid_request_error"
        own: Any = [{"type": "message", "role": "user", "content": [image(url)]}]
        await session.connection.response.create(response={"input": own})
        assert (await session.error()).param == "response.input[0].content[0].image_url"
        await session.add(image(PICTURE), {"type": "input_text", "text": "What is it?"})
        (item,) = (await session.respond())[-1].response.output
        assert "What is it?" in item.content[0].transcript

    converse(session_app(FakeChat()), main, model=MODEL)


def test_a_picture_is_fetched_once(tmp_path: Path) -> None:
    """Whatever its address has later, and however many responses read it."""
    file = tmp_path / "latest.png"
    file.write_bytes(picture := png(8, 8))

    async def main(session: Session) -> None:
        item = await session.add(image(file.as_uri()))
        assert item.content[0].image_url == file.as_uri()
        file.unlink()
        for _ in range(2):
            assert (await session.respond())[-1].response.status == "completed"
        await session.create(image(file.as_uri()))
        assert "no such file" in (await session.error()).message
        file.write_bytes(picture + bytes(1000))
        await session.create(image(file.as_uri()))
        assert "--max-realtime-text-bytes" in (await session.error()).message, "what is kept is counted"
        assert (await session.respond())[-1].response.status == "completed"

    flags = {"allowed_local_media_path": str(tmp_path), "max_realtime_text_bytes": 1000}
    converse(session_app(FakeChat(), **flags), main, model=MODEL)


def test_more_pictures_than_the_model_reads() -> None:
    async def main(session: Session) -> None:
        await session.configure(truncation="disabled")
        items = [await session.add(image(PICTURE)) for _ in range(MAX_PARTS["image"])]
        await session.create(image(PICTURE))
        assert "reads 2 images at once" in (await session.error()).message
        assert (await session.respond())[-1].response.status == "completed"
        await session.delete(items[0].id)
        await session.add(image(PICTURE))
        assert (await session.respond())[-1].response.status == "completed"

    converse(session_app(FakeChat()), main, model=MODEL)


def test_a_sound_too_short_to_be_heard_is_refused() -> None:
    async def main(session: Session) -> None:
        audio = base64.b64encode(SOUND[:48]).decode()
        await session.create({"type": "input_audio", "audio": audio})
        error = await session.error()
        assert error.param == "item.content[0].audio" and "1 ms of sound" in error.message
        await session.add({"type": "input_audio", "audio": base64.b64encode(SOUND).decode()})
        assert (await session.respond())[-1].response.status == "completed"

    converse(session_app(FakeChat()), main, model=MODEL)


@pytest.mark.parametrize("size", [1, 333])
def test_sound_in_pieces_of_odd_bytes_is_joined(size: int) -> None:
    async def main(session: Session) -> bytes:
        buffer = session.connection.input_audio_buffer
        await buffer.append(audio=base64.b64encode(SOUND[:3]).decode())
        await buffer.clear()
        await session.until("input_audio_buffer.cleared")
        for start in range(0, len(SOUND), size):
            await buffer.append(audio=base64.b64encode(SOUND[start : start + size]).decode())
        await buffer.commit()
        item = (await session.until("conversation.item.done"))[-1].item
        assert (await session.respond())[-1].response.status == "completed"
        return await sound_of(session, item)

    assert converse(session_app(FakeChat()), main, model=MODEL) == SOUND


@pytest.mark.parametrize(
    "write",
    [lambda data: base64.urlsafe_b64encode(data).decode().rstrip("="), lambda data: base64.encodebytes(data).decode()],
    ids=["URL-safe, without padding", "lines"],
)
def test_base64_is_read_as_in_a_chat(write: Any) -> None:
    data = np.random.default_rng(0).integers(0, 256, 4999 * 2, np.uint8).tobytes()

    async def main(session: Session) -> None:
        await session.connection.input_audio_buffer.append(audio=write(data))
        await session.connection.input_audio_buffer.commit()
        items = [(await session.until("conversation.item.done"))[-1].item]
        items.append(await session.add({"type": "input_audio", "audio": write(data)}))
        assert [await sound_of(session, item) for item in items] == [data, data]

    converse(session_app(FakeChat()), main, model=MODEL)


@pytest.mark.usefixtures("level_detector")
def test_an_error_of_a_turn_leaves_the_others_of_its_frame() -> None:
    """The first turn is still answered when the second and third end, which may not interrupt it."""
    chat = FakeChat(hears=True)
    chat.answer = lambda messages: [ChatDelta(text="It takes long."), *[ChatDelta(speech=TONE)] * 600]
    turn = np.repeat(np.array([1000, 0], "<i2"), 4800)
    vad: Any = {"type": "server_vad", "interrupt_response": False}

    async def main(session: Session) -> None:
        await session.configure(audio={"input": {"turn_detection": vad}})
        frame = base64.b64encode(np.tile(turn, 3).tobytes()).decode()
        await session.connection.input_audio_buffer.append(audio=frame)
        seen: dict[str, list[Any]] = {"error": [], "input_audio_buffer.committed": []}
        while [len(events) for events in seen.values()] != [2, 3]:
            event = await session.next()
            seen.get(event.type, []).append(event)
        assert {event.error.code for event in seen["error"]} == {"conversation_already_has_active_response"}
        assert len({event.item_id for event in seen["input_audio_buffer.committed"]}) == 3
        await session.connection.response.cancel()
        await session.until("response.done")
        chat.answer = lambda messages: [ChatDelta(text=str(len(messages)))]
        (item,) = (await session.respond())[-1].response.output
        assert item.content[0].transcript == "4", "three turns and the answer that was cancelled"

    converse(session_app(chat, realtime_lead_s=0.1), main, model=MODEL, manual=False)
