# SPDX-License-Identifier: Apache-2.0
"""Responses of a session: their events in OpenAI's order, the same text and speech as a chat's, cancellation, usage."""

import asyncio
import base64
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from fastapi import FastAPI

from tests.entrypoints.fake_pipelines import is_idle
from tests.entrypoints.int16_sound import assert_sounds_like
from tests.entrypoints.openai.media_apps import MODEL, app_that_writes, png, use, with_flags
from tests.entrypoints.openai.realtime.conftest import NUM_TOKENS
from tests.entrypoints.openai.realtime.sessions import Session, converse, speech_of, types_of
from tests.entrypoints.wav_files import as_uri
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.audio_formats import encode_audio
from vllm_omni.entrypoints.openai.media_input import OmniMediaConnector
from vllm_omni.entrypoints.openai.realtime.audio import FORMATS
from vllm_omni.testing.media import make_audio

GROUP = "llm"
QUESTION = "Why is the sea blue?"
LONG: Any = {"max_output_tokens": 800}
"""A response that runs when its client cancels it."""
SOUND = (make_audio(0, 0.7) * 32767).astype("<i2")

SPOKEN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio_transcript.delta",
    "response.output_audio.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
]


def chat(app: FastAPI, messages: list[Any], **fields: Any) -> Any:
    async def main(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(model=MODEL, messages=messages, **fields)

    return use(app, main)


def sea(text: str = QUESTION) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def test_a_spoken_response(realtime_app: FastAPI) -> None:
    async def main(session: Session) -> list[Any]:
        await session.say(QUESTION)
        return await session.respond()

    events = converse(realtime_app, main)
    types = list(dict.fromkeys(types_of(events)))
    assert types == SPOKEN
    done = events[-1].response
    assert done.status == "completed" or done.status_details.reason == "max_output_tokens"
    expected = chat(
        realtime_app,
        [sea()],
        modalities=["text", "audio"],
        audio={"format": "pcm16", "voice": "default"},
    )
    message = expected.choices[0].message
    (item,) = done.output
    assert item.content[0].transcript == message.audio.transcript != ""
    assert_sounds_like(speech_of(events), base64.b64decode(message.audio.data))
    assert done.usage.input_tokens == expected.usage.prompt_tokens
    assert done.usage.output_tokens == expected.usage.completion_tokens
    assert done.usage.output_token_details.audio_tokens > 0
    assert done.usage.output_token_details.text_tokens == NUM_TOKENS


def test_a_conversation_is_a_chat(realtime_app: FastAPI) -> None:
    """Text and sound, instructions, text answers: the model reads what a chat with the same messages reads."""

    async def main(session: Session) -> list[Any]:
        await session.configure(instructions="Be kind.", output_modalities=["text"])
        heard = await session.speak(SOUND)
        assert heard.content[0].type == "input_audio" and heard.content[0].audio is None
        first = await session.respond()
        await session.say(QUESTION)
        return [first, await session.respond(max_output_tokens=5)]

    first, second = converse(realtime_app, main)
    assert types_of(first)[3:6] == [
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
    ]
    answers = [events[-1].response for events in (first, second)]
    texts = [answer.output[0].content[0].text for answer in answers]
    wav = encode_audio(SOUND.astype(np.float32) / 32768, "wav", 24000)
    uri = as_uri(wav)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": uri}}]},
    ]
    expected = chat(realtime_app, messages)
    assert texts[0] == expected.choices[0].message.content != ""
    usage = answers[0].usage
    assert usage.input_tokens == expected.usage.prompt_tokens
    assert usage.input_token_details.audio_tokens > 3
    expected = chat(realtime_app, [*messages, {"role": "assistant", "content": texts[0]}, sea()], max_tokens=5)
    assert texts[1] == expected.choices[0].message.content != texts[0]
    assert answers[1].status == "incomplete" and answers[1].status_details.reason == "max_output_tokens"
    assert answers[1].usage.output_tokens == 5


@pytest.mark.slow
def test_many_spoken_turns(realtime_app: FastAPI) -> None:
    """More than the media parts that a request may have: those of a session are limited by their length."""

    async def main(session: Session) -> Any:
        for _ in range(65):
            await session.speak(SOUND[:2400])
        return (await session.respond(output_modalities=["text"], max_output_tokens=4))[-1].response

    response = converse(realtime_app, main)
    assert response.status == "incomplete" and response.usage.input_token_details.audio_tokens >= 65


def test_a_function_call_and_its_output(realtime_app: FastAPI) -> None:
    parameters = {
        "type": "object",
        "properties": {"sea": {"enum": ["red"]}},
        "required": ["sea"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "name": "dive", "parameters": parameters, "strict": True}

    async def main(session: Session) -> Any:
        await session.configure(tools=[tool])
        await session.say(QUESTION)
        events = await session.respond(tool_choice={"type": "function", "name": "dive"}, max_output_tokens=100)
        (call,) = events[-1].response.output
        await session.connection.conversation.item.create(
            item={"type": "function_call_output", "call_id": call.call_id, "output": "It is warm."}
        )
        await session.until("conversation.item.done")
        return events, await session.respond(output_modalities=["text"], tool_choice="none")

    events, answer = converse(realtime_app, main)
    assert types_of(events) == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    (call,) = events[-1].response.output
    assert call.name == "dive" and json.loads(call.arguments) == {"sea": "red"}
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and call.status == "completed"
    assert events[-1].response.usage.output_tokens > 0
    (item,) = answer[-1].response.output
    function = {"name": "dive", "arguments": call.arguments}
    expected = chat(
        realtime_app,
        [
            sea(),
            {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "It is warm."},
        ],
        tools=[{"type": "function", "function": {"name": "dive", "parameters": parameters, "strict": True}}],
        tool_choice="none",
    )
    assert item.content[0].text == expected.choices[0].message.content


def test_the_model_chooses_a_tool(realtime_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    """`tool_choice: auto`, and a model that can write only a call: what it writes is neither shown nor spoken."""
    written = '<tool_call>\n{"name": "dive", "arguments": {"sea": "red"}}\n</tool_call>'
    app = app_that_writes(realtime_llm, tiny_qwen3_omni_moe, written)
    tool: Any = {"type": "function", "name": "dive", "parameters": {"type": "object"}}

    async def main(session: Session) -> list[Any]:
        configured = await session.configure(tools=[tool])
        assert configured.tool_choice == "auto"
        await session.say(QUESTION)
        return await session.respond(max_output_tokens=100)

    events = converse(app, main)
    done = events[-1].response
    (call,) = done.output
    assert done.status == "completed" and call.type == "function_call"
    assert call.name == "dive" and json.loads(call.arguments) == {"sea": "red"}
    assert not {name for name in types_of(events) if "text" in name or "audio" in name}


@pytest.mark.slow
def test_a_response_out_of_band(realtime_app: FastAPI) -> None:
    """Its own input, with a reference, beside a response of the conversation; the conversation stays as it is."""

    async def main(session: Session) -> Any:
        item = await session.say(QUESTION)
        own: Any = [{"type": "item_reference", "id": item.id}]
        await session.connection.response.create(response={"output_modalities": ["text"]})
        await session.connection.response.create(
            response={"conversation": "none", "input": own, "output_modalities": ["text"], "metadata": {"a": "b"}}
        )
        events = await session.until("response.done") + await session.until("response.done")
        done = [event.response for event in events if event.type == "response.done"]
        added = [event.item.id for event in events if event.type == "conversation.item.added"]
        await session.delete(added[0])
        await session.say("And now?")
        return done, added, (await session.respond(output_modalities=["text"]))[-1].response

    done, added, last = converse(realtime_app, main)
    by_band = {response.conversation_id is None: response for response in done}
    assert by_band[True].metadata == {"a": "b"} and by_band[False].metadata is None
    assert by_band[True].output[0].content[0].text == by_band[False].output[0].content[0].text
    assert added == [by_band[False].output[0].id]
    expected = chat(realtime_app, [sea(), sea("And now?")])
    assert last.output[0].content[0].text == expected.choices[0].message.content


def test_a_response_is_cancelled(realtime_app: FastAPI, realtime_llm: AsyncOmniLLM) -> None:
    async def main(session: Session) -> Any:
        await session.say(QUESTION)
        await session.connection.response.create(response=LONG)
        while (event := await session.next()).type != "response.output_audio_transcript.delta":
            pass
        await session.connection.response.cancel()
        events = await session.until("response.done")
        await wait_until_idle(realtime_llm)
        await session.truncate(event.item_id, 0)
        item = await session.retrieve(event.item_id)
        again = await session.respond(output_modalities=["text"])
        return events, item, again

    events, item, again = converse(realtime_app, main)
    response = events[-1].response
    assert response.status == "cancelled" and response.status_details.reason == "client_cancelled"
    assert response.output[0].status == "incomplete" and response.usage.input_tokens > 0
    assert [event.type for event in events[-6:]] == SPOKEN[-6:]
    assert item.content[0].transcript == ""
    assert again[-1].response.status == "incomplete"


@pytest.mark.slow
def test_a_cancellation_may_come_at_any_moment(realtime_app: FastAPI) -> None:
    """Every item that was added is done, in order, whichever event came last."""

    async def main(session: Session) -> None:
        await session.say(QUESTION)
        for num_events in range(7):
            await session.connection.response.create(response=LONG)
            events = [await session.next() for _ in range(num_events)]
            await session.connection.response.cancel()
            events += await session.until("response.done")
            types = list(dict.fromkeys(types_of(events)))
            assert types == [name for name in SPOKEN if name in types]
            assert events[-1].response.status == "cancelled"
            started, ended = ([name for name in types if name.endswith(end)] for end in (".added", "item.done"))
            assert (len(started), len(ended)) in ((0, 0), (3, 2)), types

    converse(realtime_app, main)


def test_a_client_abort_ends_everything(realtime_app: FastAPI, realtime_llm: AsyncOmniLLM) -> None:
    async def main(session: Session) -> None:
        await session.say(QUESTION)
        await session.connection.response.create(response=LONG)
        await session.connection.response.create(response={"conversation": "none", **LONG})
        while (await session.next()).type != "response.output_audio_transcript.delta":
            pass
        await session.connection.close()
        await wait_until_idle(realtime_llm)

    converse(realtime_app, main)


async def wait_until_idle(llm: AsyncOmniLLM) -> None:
    deadline = time.monotonic() + 120
    while not is_idle(llm):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_errors_leave_the_session(realtime_app: FastAPI) -> None:
    async def main(session: Session) -> None:
        connection = session.connection
        await connection.response.cancel()
        assert (await session.error()).code == "response_cancel_not_active"
        await connection.input_audio_buffer.commit()
        assert (await session.error()).code == "input_audio_buffer_commit_empty"
        await connection.send_raw('{"type": "response.creat", "event_id": "mine"}')
        error = await session.error()
        assert error.param == "type" and error.event_id == "mine"
        for fields, param in WRONG:
            await connection.session.update(session={"type": "realtime", **fields})
            error = await session.error()
            assert error.param == f"session.{param}", error
        await connection.conversation.item.retrieve(item_id="unknown")
        assert (await session.error()).code == "item_retrieve_invalid_item_id"
        item = await session.say("Hello")
        again: Any = {"id": item.id, "type": "message", "role": "user", "content": []}
        await connection.conversation.item.create(item=again)
        assert (await session.error()).code == "item_create_duplicate_item_id"
        await connection.conversation.item.delete(item_id=item.id)
        await session.until("conversation.item.deleted")
        await connection.response.create(response={"audio": {"output": {"voice": "nobody"}}})
        assert (await session.error()).param == "response.audio.output.voice"
        await session.say(QUESTION)
        await connection.response.create()
        await connection.response.create()
        events = [await session.next(), await session.next()]
        while "error" not in {event.type for event in events}:
            events.append(await session.next())
        assert events[-1].error.code == "conversation_already_has_active_response"
        await session.until("response.done")
        assert (await session.respond(output_modalities=["text"]))[-1].response.output

    converse(realtime_app, main)


WRONG: list[tuple[Any, str]] = [
    ({"output_modalities": ["text", "audio"]}, "output_modalities"),
    ({"audio": {"output": {"voice": "nobody"}}}, "audio.output.voice"),
    ({"audio": {"output": {"speed": 3.0}}}, "audio.output.speed"),
    ({"audio": {"input": {"noise_reduction": {"type": "near_field"}}}}, "audio.input.noise_reduction"),
    ({"audio": {"input": {"transcription": {"language": "klingon"}}}}, "audio.input.transcription.language"),
    ({"audio": {"input": {"transcription": {"prompt": "a" * 5000}}}}, "audio.input.transcription.prompt"),
    ({"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 2}}}},
     "audio.input.turn_detection.threshold"),
    ({"audio": {"input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 10}}}},
     "audio.input.turn_detection.idle_timeout_ms"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0]"),
    ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice"),
    ({"model": "another"}, "model"),
    ({"truncation": {"type": "retention_ratio", "retention_ratio": 1.5}}, "truncation.retention_ratio"),
    ({"truncation": {"type": "retention_ratio", "retention_ratio": 1, "token_limits": {"post_instructions": 2000}}},
     "truncation.token_limits.post_instructions"),
    ({"prompt": {"id": "a"}}, "prompt"),
]  # fmt: skip


def test_a_prompt_that_is_too_long_fails_its_response(realtime_app: FastAPI) -> None:
    async def main(session: Session) -> None:
        item = await session.say("word " * 3000)
        failed = (await session.respond())[-1].response
        assert failed.status == "failed" and failed.output == []
        assert failed.status_details.error.code == "400" and "1024" in failed.status_details.error.message
        await session.delete(item.id)
        await session.say(QUESTION)
        assert (await session.respond(output_modalities=["text"]))[-1].response.output

    converse(realtime_app, main)


@pytest.mark.slow
def test_other_formats_and_speeds(realtime_app: FastAPI) -> None:
    async def main(session: Session) -> list[bytes]:
        await session.say(QUESTION)
        speech = [speech_of(await session.respond())]
        for output in ({"format": {"type": "audio/pcmu"}}, {"format": {"type": "audio/pcm"}, "speed": 1.5}):
            await session.configure(audio={"output": output})
            speech.append(speech_of(await session.respond(input=[{"type": "message", **USER}])))
        return speech

    pcm, ulaw, fast = converse(realtime_app, main)
    assert len(ulaw) == pytest.approx(len(pcm) / 6, rel=0.02)
    assert len(fast) == pytest.approx(len(pcm) / 1.5, rel=0.1)


@pytest.mark.parametrize("kind", ["audio/pcmu", "audio/pcma"])
def test_the_sound_of_a_telephone(realtime_app: FastAPI, kind: str) -> None:
    """G.711 in: the model hears what it hears in a chat with the same 8 kHz; the client gets its sound back."""
    g711 = FORMATS[kind]
    sent = g711.encode(SOUND[::3])

    async def main(session: Session) -> tuple[Any, Any]:
        settings = await session.configure(audio={"input": {"format": {"type": kind}}}, output_modalities=["text"])
        assert settings.audio.input.format.type == kind
        item = await session.speak(np.frombuffer(sent, np.uint8))
        return (await session.respond())[-1].response, await session.retrieve(item.id)

    response, item = converse(realtime_app, main)
    np.testing.assert_array_equal(g711.decode(base64.b64decode(item.content[0].audio)), g711.decode(sent))
    wav = encode_audio(g711.decode(sent).astype(np.float32) / 32768, "wav", 8000)
    uri = as_uri(wav)
    expected = chat(realtime_app, [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": uri}}]}])
    assert response.output[0].content[0].text == expected.choices[0].message.content != ""
    assert response.usage.input_tokens == expected.usage.prompt_tokens


USER: Any = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}


def test_an_image_that_was_fetched(realtime_app: FastAPI, tmp_path: Path) -> None:
    image = "data:image/png;base64," + base64.b64encode(png(56, 56)).decode()
    (tmp_path / "a.png").write_bytes(png(56, 56))
    url = (tmp_path / "a.png").as_uri()

    async def main(session: Session) -> Any:
        await session.add({"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION})
        return (await session.respond(output_modalities=["text"]))[-1].response

    response = converse(with_flags(realtime_app, f"--allowed-local-media-path={tmp_path}"), main)
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": QUESTION}]
    expected = chat(realtime_app, [{"role": "user", "content": content}])
    assert response.output[0].content[0].text == expected.choices[0].message.content
    assert response.usage.input_token_details.image_tokens > 0


def test_a_history_is_decoded_once(realtime_app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sounds and pictures: responses read what the model's processor has kept of them, and decode them again only
    if it is dropped, also just before it is read. All answers are those of chats."""
    cache = realtime_app.state.engine_client.renderer.mm_processor_cache
    load = OmniMediaConnector.load_from_url_async
    decoded: list[str] = []
    is_dropped = False

    async def noted(connector: OmniMediaConnector, url: str, *args: Any, **options: Any) -> Any:
        loaded = await load(connector, url, *args, **options)
        if loaded is not None:
            decoded.append(url[:6])
        elif is_dropped and url.startswith("image:"):  # The last of them.
            cache.clear_cache()
        return loaded

    monkeypatch.setattr(OmniMediaConnector, "load_from_url_async", noted)
    picture = "data:image/png;base64," + base64.b64encode(png(56, 56)).decode()

    async def main(session: Session) -> list[Any]:
        nonlocal is_dropped
        await session.configure(output_modalities=["text"])
        await session.speak(SOUND)
        await session.add({"type": "input_image", "image_url": picture})
        assert decoded == ["data:i"], "it can be read"
        responses = []
        for text, expected in (("", 1), ("And now?", 1), ("And then?", 2)):
            is_dropped = expected > 1
            if text:
                await session.say(text)
            responses.append((await session.respond(max_output_tokens=5))[-1].response)
            assert Counter(decoded[1:]) == {"sound:": expected, "image:": expected}
        return responses

    responses = converse(realtime_app, main)
    monkeypatch.undo()
    uri = as_uri(encode_audio(SOUND.astype(np.float32) / 32768, "wav", 24000))
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": uri}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]},
    ]
    for response, text in zip(responses, ("And now?", "And then?", ""), strict=True):
        expected = chat(realtime_app, messages, max_tokens=5)
        assert response.output[0].content[0].text == expected.choices[0].message.content != ""
        assert response.usage.input_tokens == expected.usage.prompt_tokens
        messages += [{"role": "assistant", "content": response.output[0].content[0].text}, sea(text)]


@pytest.mark.slow
def test_transcription_by_the_model(realtime_app: FastAPI) -> None:
    wav = encode_audio(SOUND.astype(np.float32) / 32768, "wav", 24000)

    async def expected(client: openai.AsyncOpenAI) -> str:
        return (await client.audio.transcriptions.create(model=MODEL, file=wav, language="en")).text

    async def main(session: Session) -> None:
        await session.configure(audio={"input": {"transcription": {"model": "whisper-1", "language": "en"}}})
        item = await session.speak(SOUND)
        events = await session.until("conversation.item.input_audio_transcription.completed")
        done = events[-1]
        assert done.transcript == text != "" and done.item_id == item.id and done.usage.output_tokens == NUM_TOKENS
        assert "".join(event.delta for event in events[:-1]) == text
        content = (await session.retrieve(item.id)).content[0]
        assert content.transcript == text and base64.b64decode(content.audio) == SOUND.tobytes()

    text = use(realtime_app, expected)
    converse(realtime_app, main)


def test_a_turn_finds_the_cache_of_those_before(realtime_app: FastAPI) -> None:
    """The messages of a response are the first of the next one's, so the engine has their KV cache."""

    async def main(session: Session) -> list[Any]:
        usages = []
        for text in ("The tide is low, the boats lie on the sand. " * 20, "And now?"):
            await session.say(text)
            usages.append((await session.respond(output_modalities=["text"]))[-1].response.usage)
        return usages

    first, second = converse(realtime_app, main)
    assert first.input_token_details.cached_tokens == 0
    assert 0 < second.input_token_details.cached_tokens <= first.input_tokens + first.output_tokens
