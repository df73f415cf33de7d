# SPDX-License-Identifier: Apache-2.0
"""Items as chat messages, their order, and speech that was cut."""

import base64
import io
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from vllm import envs

from tests.entrypoints.openai.realtime.fake_chat import MODEL, FakeChat, session_app
from tests.entrypoints.openai.realtime.sessions import Session, converse
from vllm_omni.entrypoints.openai.media_input import CONNECTOR_NAME
from vllm_omni.entrypoints.openai.realtime import protocol
from vllm_omni.entrypoints.openai.realtime.audio import FORMATS, InputBuffer, Sound
from vllm_omni.entrypoints.openai.realtime.conversation import (
    Conversation,
    Item,
    Picture,
    Speech,
    read_item,
    spoken_length,
    to_messages,
)
from vllm_omni.entrypoints.openai.realtime.protocol import EventError
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta

PCM = FORMATS["audio/pcm"]
EIGHT = "one two three four five six seven eight"


def item(sound_format: Any = PCM, **fields: Any) -> Item:
    return read_item(protocol.read_item(fields, ("item",)), sound_format, {}, "item")


def message(role: str, *content: dict[str, Any], **fields: Any) -> Item:
    return item(type="message", role=role, content=list(content), **fields)


def spoken(text: str, sent_ms: float, made_ms: float) -> Item:
    made = message("assistant", {"type": "output_audio", "transcript": text})
    made.speech = Speech(made_ms=made_ms, text_length=spoken_length(text), is_made=True, sent_ms=sent_ms)
    return made


def test_items_are_messages() -> None:
    sound = base64.b64encode(np.arange(800, dtype="<i2").tobytes()).decode()
    image = "data:image/png;base64,AAAA"
    user = message("user", {"type": "input_audio", "audio": sound}, {"type": "input_image", "image_url": image})
    items = [
        message("system", {"type": "input_text", "text": "Now in French."}),
        user,
        message("assistant", {"type": "output_text", "text": "Let me look."}),
        item(type="function_call", call_id="a", name="look", arguments="{}"),
        item(type="function_call", call_id="b", name="dive", arguments="{}"),
        item(type="function_call_output", call_id="a", output="blue"),
    ]
    messages = to_messages("Be kind.", items)
    assert [each["role"] for each in messages] == ["system", "system", "user", "assistant", "tool"]
    assert [call["id"] for call in messages[3]["tool_calls"]] == ["a", "b"]
    assert messages[3]["content"] == "Let me look." and messages[4]["tool_call_id"] == "a"
    heard, seen = messages[2]["content"]
    assert heard["audio_url"]["url"] == user.sounds[0].address
    np.testing.assert_array_equal(user.sounds[0].samples, np.arange(800))
    assert seen == {"type": "image_url", "image_url": {"url": image}}
    user.pictures[1] = Picture(image)
    assert to_messages("", [user])[0]["content"][1]["uuid"] == user.pictures[1].address
    assert "audio" not in user.data["content"][0] and user.with_sound()["content"][0]["audio"] == sound


def test_wrong_items() -> None:
    for part, param in [
        ({"type": "input_text"}, "item.content[0].text"),
        ({"type": "input_audio", "audio": "?"}, "item.content[0].audio"),
        ({"type": "input_audio", "audio": "AAAA"}, "item.content[0].audio"),  # 3 bytes
        ({"type": "input_image"}, "item.content[0].image_url"),
    ]:
        with pytest.raises(EventError) as caught:
            message("user", part)
        assert caught.value.param == param


def test_the_order_of_items() -> None:
    conversation = Conversation()
    assert conversation.add(message("user", id="a")) is None
    assert conversation.add(message("user", id="c")) == "a"
    assert conversation.add(message("user", id="b"), "a") == "a"
    assert conversation.add(message("user", id="first"), "root") is None
    assert [each.id for each in conversation] == ["first", "a", "b", "c"]
    assert conversation.last_id == "c" and conversation.before(conversation.get("b")) == "a"
    conversation.delete("b")
    assert [each.id for each in conversation] == ["first", "a", "c"]
    for failing in (
        lambda: conversation.add(message("user", id="a")),
        lambda: conversation.add(message("user"), "b"),
        lambda: conversation.get("b"),
        lambda: conversation.delete("b"),
    ):
        with pytest.raises(EventError):
            failing()
    assert len(list(conversation)) == 3


def test_speech_is_cut_where_it_was_not_played() -> None:
    half = spoken(EIGHT, sent_ms=4000, made_ms=4000)
    half.truncate(0, 2000)
    assert half.content[0]["transcript"] == "one two three four"
    half.truncate(0, 0)
    assert half.content[0]["transcript"] == ""
    # The model had made more than was sent.
    cancelled = spoken(EIGHT, sent_ms=1000, made_ms=4000)
    cancelled.truncate(0, 1000)
    assert cancelled.content[0]["transcript"] == "one two"
    whole = spoken(EIGHT, sent_ms=4000, made_ms=4000)
    whole.truncate(0, 4000)
    assert whole.content[0]["transcript"] == EIGHT
    written = message("assistant", {"type": "output_text", "text": "a"})
    for each, index, end, param in (
        (whole, 0, 4001, "audio_end_ms"),
        (whole, 0, -1, "audio_end_ms"),
        (whole, 1, 100, "content_index"),
        (written, 0, 0, "content_index"),
    ):
        with pytest.raises(EventError) as caught:
            each.truncate(index, end)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "share", "heard"),
    [
        ("你好、世界。今天天气很好", 0.5, "你好、世界。"),
        ("こんにちは、トーキョーです。", 0.5, "こんにちは、ト"),
        ("สวัสดีครับผมชื่อน้ำ", 0.25, "สวัส"),  # The vowel above the next consonant is not cut off.
        ("我喜欢Python编程", 0.5, "我喜欢"),
        ("Yes. 我喜欢你", 0.5, "Yes. 我"),  # A character takes longer than a letter.
        ("안녕하세요 세상아", 0.7, "안녕하세요"),
        ("Un, deux,\ntrois", 0.8, "Un, deux,"),
    ],
)
def test_words_are_not_cut_and_scripts_without_spaces_are(text: str, share: float, heard: str) -> None:
    answer = spoken(text, sent_ms=4000, made_ms=4000)
    answer.truncate(0, round(4000 * share))
    assert answer.content[0]["transcript"] == heard
    assert to_messages("", [answer]) == [{"role": "assistant", "content": heard}]
    answer.truncate(0, 0)
    assert answer.content[0]["transcript"] == ""


def test_the_input_buffer() -> None:
    pcm: Any = SimpleNamespace(sample_rate=8000, num_bytes=2, decode=PCM.decode)
    buffer = InputBuffer(pcm)
    for start in range(0, 8000, 800):
        buffer.append(PCM.encode(np.arange(start, start + 800, dtype=np.int16)))
    assert buffer.seconds == 1.0 and buffer.end_ms == 1000
    buffer.keep_last(500)
    buffer.drop_before(750)
    buffer.drop_before(600)
    assert buffer.end_ms == 1000
    sound = buffer.take(until_ms=850)
    np.testing.assert_array_equal(sound.samples, np.arange(6000, 6800))
    assert buffer.end_ms == 1000 and buffer.seconds == 0.15
    sound = buffer.take()
    np.testing.assert_array_equal(sound.samples, np.arange(6800, 8000))
    assert buffer.seconds == 0 and buffer.end_ms == 1000 and sound.seconds == 0.15
    data = PCM.encode(np.zeros(8000, np.int16))
    num_references = sys.getrefcount(data)
    buffer.append(data)
    buffer.keep_last(100)
    assert buffer.seconds == 0.1 and sys.getrefcount(data) == num_references, "what was dropped is not held"


@pytest.mark.parametrize(("is_made", "heard"), [(False, "one two"), (True, EIGHT)], ids=["being made", "made"])
def test_speech_that_is_being_made_is_as_long_as_its_text(is_made: bool, heard: str) -> None:
    """Else an answer that is interrupted where speech is made slowly would be remembered whole."""
    chat = FakeChat()
    chat.answer = lambda messages: [ChatDelta(text=EIGHT, speech=np.zeros(12_000, np.float32))]
    chat.may_end = is_made

    async def main(session: Session) -> str:
        await session.connection.response.create()
        while sum(event.type == "response.output_audio.delta" for event in session.events) < 3:  # 500 ms
            await session.next()
        if not is_made:
            await session.connection.response.cancel()
        (item,) = (await session.until("response.done"))[-1].response.output
        await session.truncate(item.id, 500)
        transcript: str = (await session.retrieve(item.id)).content[0].transcript
        return transcript

    assert converse(session_app(chat), main, model=MODEL) == heard


@pytest.mark.parametrize(("connector", "start"), [(CONNECTOR_NAME, "sound:"), ("http", "data:audio/wav;base64,")])
def test_another_connector_gets_sounds_as_files(monkeypatch: pytest.MonkeyPatch, connector: str, start: str) -> None:
    """It does not know the addresses of a session."""
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", connector)
    envs.disable_envs_cache()
    samples = np.array([0, 1000, -1000], np.int16)
    url = Sound(samples, FORMATS["audio/pcm"]).url
    assert url.startswith(start)
    if connector != CONNECTOR_NAME:
        read, rate = soundfile.read(io.BytesIO(base64.b64decode(url.removeprefix(start))), dtype="int16")
        assert rate == 24000 and (read == samples).all()
