# SPDX-License-Identifier: Apache-2.0
"""Items as chat messages, their order, and speech that was cut."""

import asyncio
import base64
import io
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from vllm import envs

from vllm_omni.entrypoints.openai.media_input import CONNECTOR_NAME
from vllm_omni.entrypoints.openai.realtime import protocol
from vllm_omni.entrypoints.openai.realtime.audio import FORMATS
from vllm_omni.entrypoints.openai.realtime.conversation import (
    Conversation,
    Item,
    Sound,
    read_item,
    spoken_length,
    to_messages,
)
from vllm_omni.entrypoints.openai.realtime.input_buffer import InputBuffer
from vllm_omni.entrypoints.openai.realtime.output_items import SessionContext
from vllm_omni.entrypoints.openai.realtime.protocol import EventError
from vllm_omni.entrypoints.openai.realtime.response import Response
from vllm_omni.entrypoints.openai.realtime.session_budget import SessionBudget
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.server_args import RealtimeLimits
from vllm_omni.entrypoints.openai.streamed_chat import ChatDelta

PCM = FORMATS["audio/pcm"]


def item(sound_format: Any = PCM, **fields: Any) -> Item:
    return read_item(protocol.read_item(fields, ("item",)), sound_format, {}, "item")


def message(role: str, *content: dict[str, Any], **fields: Any) -> Item:
    return item(type="message", role=role, content=list(content), **fields)


def spoken(text: str, sent_ms: float, made_ms: float) -> Item:
    made = message("assistant", {"type": "output_audio", "transcript": text})
    made.sent_ms, made.made_ms, made.text_length = sent_ms, made_ms, spoken_length(text)
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
    text = "one two three four five six seven eight"
    half = spoken(text, sent_ms=4000, made_ms=4000)
    half.truncate(0, 2000)
    assert half.content[0]["transcript"] == "one two three four"
    half.truncate(0, 0)
    assert half.content[0]["transcript"] == ""
    # The model had made more than was sent.
    cancelled = spoken(text, sent_ms=1000, made_ms=4000)
    cancelled.truncate(0, 1000)
    assert cancelled.content[0]["transcript"] == "one two"
    whole = spoken(text, sent_ms=4000, made_ms=4000)
    whole.truncate(0, 4000)
    assert whole.content[0]["transcript"] == text
    for index, end in ((0, 4001), (0, -1), (1, 100)):
        with pytest.raises(EventError):
            whole.truncate(index, end)
    with pytest.raises(EventError, match="only speech"):
        message("assistant", {"type": "output_text", "text": "a"}).truncate(0, 0)


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


def test_speech_that_is_being_made_is_as_long_as_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an answer that is interrupted where speech is made slowly would be remembered whole."""
    text, half_second = "one two three four five six seven eight", np.zeros(12_000, np.float32)

    async def main() -> None:
        goes_on, waits = asyncio.Event(), asyncio.Event()

        async def deltas_of(*_: Any) -> AsyncGenerator[ChatDelta, None]:
            yield ChatDelta(text=text)
            for _ in range(2):
                yield ChatDelta(speech=half_second)
                waits.set()
                await goes_on.wait()

        async def send(*_: Any, **__: Any) -> None: ...

        monkeypatch.setattr("vllm_omni.entrypoints.openai.realtime.response.deltas_of", deltas_of)
        handler: Any = SimpleNamespace(asr_stage=None)
        budget = SessionBudget(RealtimeLimits())
        session = SessionContext(
            send=send, chat=handler, client=RequestContext(), sample_rate=24_000, lead_s=10.0, budget=budget
        )
        settings = {
            "model": "m", "instructions": "", "output_modalities": ["audio"], "tools": [], "max_output_tokens": "inf",
            "audio": {"output": {"format": {"type": "audio/pcm"}, "voice": "marin", "speed": 1.0}},
        }  # fmt: skip
        response = Response(session, settings, [message("user", {"type": "input_text", "text": "count"})], None, None)
        task = response.start()
        await waits.wait()
        while not response._outputs:
            await asyncio.sleep(0)
        (output,) = response._outputs
        assert output.item.text_length == len(text) and 2000 < output.item.made_ms < 4000
        goes_on.set()
        await task
        assert output.item.made_ms == 1000

    asyncio.run(main())


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
