# SPDX-License-Identifier: Apache-2.0
"""Sessions that are longer than the model's context, and than the sound that a session keeps."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from vllm.exceptions import VLLMValidationError

from tests.entrypoints.int16_sound import assert_sounds_like
from tests.entrypoints.openai.media_apps import png, with_flags
from tests.entrypoints.openai.realtime.fake_chat import FakeChat, session_app
from tests.entrypoints.openai.realtime.sessions import Session, converse, opened, speech_of, visit
from tests.entrypoints.openai.realtime.test_conversation import item
from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.realtime import session as session_module
from vllm_omni.entrypoints.openai.realtime.chat_stream import PromptWindow
from vllm_omni.entrypoints.openai.realtime.config import PromptLimits
from vllm_omni.entrypoints.openai.realtime.conversation import Item

GROUP = "llm"
SPEECH: Any = {"output_modalities": ["audio"], "max_output_tokens": 8}
TEXT: Any = {"output_modalities": ["text"], "max_output_tokens": 8}
LENGTH = 1000


def says(role: str, text: str) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return item(type="message", role=role, content=[{"type": kind, "text": text}])


def called(call_id: str) -> Item:
    return item(type="function_call", call_id=call_id, name="look", arguments="{}")


def returned(call_id: str) -> Item:
    return item(type="function_call_output", call_id=call_id, output="blue")


def fit(
    items: Sequence[Item], cost: dict[str, int], *, truncation: Any = "auto", lasts: bool = True, **limits: Any
) -> tuple[list[Any], int]:
    """The messages after the instructions that are read, and the number of renderings. A message costs what its
    text, or role, says; 50 the instructions, and 1 any other."""
    settings = {"instructions": "Be kind.", "max_output_tokens": 100, "truncation": truncation}
    return read(PromptWindow(settings, items, PromptLimits(max_model_len=LENGTH, **limits), lasts=lasts), cost)


def read(window: PromptWindow, cost: dict[str, int]) -> tuple[list[Any], int]:
    """As `fit`."""
    num_renderings = 0

    async def render(request: Any) -> Any:
        nonlocal num_renderings
        num_renderings += 1
        length = sum(_cost(message, cost) for message in request.messages)
        if length > LENGTH:
            raise VLLMValidationError("too long", parameter="input_tokens", value=length)
        return [], [{"prompt_token_ids": [0] * length}]

    async def main() -> list[Any]:
        fields = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        request = OmniChatCompletionRequest.model_validate(fields)
        await window.render(request, render)
        return request.messages

    first, *others = asyncio.run(main())
    assert first["role"] == "system" and first["content"] == "Be kind."
    return others, num_renderings


def _cost(message: dict[str, Any], cost: dict[str, int]) -> int:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return cost.get(text, cost.get(message["role"], 50 if text == "Be kind." else 1))


def texts(messages: list[Any]) -> list[str]:
    return ["".join(part["text"] for part in each["content"]) for each in messages if each["role"] == "user"]


def turns(number: int) -> list[Item]:
    return [each for i in range(number) for each in (says("user", f"u{i}"), says("assistant", f"a{i}"))]


def test_what_fits_is_rendered_once() -> None:
    messages, num_renderings = fit(turns(5), {})
    assert len(messages) == 10 and num_renderings == 1


@pytest.mark.parametrize("number", [9, 10, 40, 400])
def test_only_what_must_leave_leaves(number: int) -> None:
    """900 tokens are left beside those of the answer: 50 of the instructions and 8 turns of 100."""
    items = [*turns(number), says("user", "last")]
    messages, num_renderings = fit(items, {f"u{i}": 99 for i in range(number)})
    assert texts(messages) == [f"u{i}" for i in range(number - 8, number)] + ["last"]
    assert num_renderings <= 2 + 2 * number.bit_length()
    assert [each.is_read for each in items] == [False] * 2 * (number - 8) + [True] * 17


def test_a_share_is_retained() -> None:
    """Half of the 850 tokens after the instructions: four turns, and the last message. Not before it must be."""
    ratio = {"type": "retention_ratio", "retention_ratio": 0.5}
    cost = {f"u{i}": 99 for i in range(20)}
    assert len(fit([*turns(8), says("user", "last")], cost, truncation=ratio)[0]) == 17
    assert texts(fit([*turns(9), says("user", "last")], cost, truncation=ratio)[0]) == ["u5", "u6", "u7", "u8", "last"]
    limited = {**ratio, "token_limits": {"post_instructions": 450}}
    assert texts(fit([*turns(5), says("user", "last")], cost, truncation=limited)[0]) == ["u3", "u4", "last"]
    assert len(fit([*turns(4), says("user", "last")], cost, truncation=limited)[0]) == 9
    nothing = {**ratio, "retention_ratio": 0.0}
    assert texts(fit([*turns(9), says("user", "last")], cost, truncation=nothing)[0]) == ["last"]


@pytest.mark.parametrize("is_read_before", [True, False])
def test_a_speculative_answer_changes_nothing_before_it_is_promoted(is_read_before: bool) -> None:
    items = [*turns(10), says("user", "last")]
    cost = {f"u{i}": 99 for i in range(10)}
    settings = {"instructions": "Be kind.", "max_output_tokens": 100, "truncation": "auto"}
    limits = PromptLimits(max_model_len=LENGTH)
    window = PromptWindow(settings, items, limits, lasts=True, is_speculative=True)
    for promotes in (not is_read_before, is_read_before):
        if promotes:
            window.promote()
        else:
            assert texts(read(window, cost)[0]) == [f"u{i}" for i in range(2, 10)] + ["last"]
            assert [each.is_read for each in items] == [is_read_before] * 4 + [True] * 17
    assert [each.is_read for each in items] == [False] * 4 + [True] * 17


def test_an_answer_out_of_band_changes_nothing() -> None:
    items = [*turns(20), says("user", "last")]
    fit(items, {f"u{i}": 99 for i in range(20)}, lasts=False)
    assert all(each.is_read for each in items)


def test_no_result_is_read_without_its_call() -> None:
    late = [says("user", "u0"), called("x"), says("user", "u1"), returned("x"), says("assistant", "a1")]
    messages, _ = fit([*late, says("user", "last")], {"u0": 890})
    assert [each["role"] for each in messages] == ["user", "assistant", "user"]
    # Within a turn of many calls, too.
    steps = [each for i in range(30) for each in (called(str(i)), returned(str(i)))]
    messages, _ = fit([says("user", "u0"), *steps], {"tool": 99})
    assert [each["role"] for each in messages] == ["assistant", "tool"] * 8
    assert [each["tool_calls"][0]["id"] for each in messages[::2]] == [str(i) for i in range(22, 30)]


def test_the_newest_item_is_too_long_alone() -> None:
    with pytest.raises(VLLMValidationError) as caught:
        fit([*turns(3), says("user", "long")], {"long": 2000})
    assert caught.value.parameter == "input_tokens"
    # Longer than leaves room for the answer that was asked for, but not than the context.
    assert texts(fit([*turns(3), says("user", "long")], {"long": 940})[0]) == ["long"]


def test_only_so_many_media_are_read() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64," + base64.b64encode(png(1)).decode()}
    items = [item(type="message", role="user", content=[image]) for _ in range(7)]
    messages, num_renderings = fit(items, {}, max_parts={"image": 3})
    assert len(messages) == 3 and num_renderings == 1


def test_room_for_the_answer() -> None:
    limits = PromptLimits(max_model_len=32_768)
    assert limits.max_input_tokens("inf") == 32_768 - 4096 and limits.max_input_tokens(100) == 32_668
    assert limits.max_input_tokens(30_000) == 16_384
    assert PromptLimits(max_model_len=1024).max_input_tokens("inf") == 768
    assert PromptLimits(max_model_len=1024, max_tokens=12).max_input_tokens("inf") == 1012


def test_the_oldest_turns_are_deleted_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts and of items; the client gets to know which."""
    monkeypatch.setattr(session_module, "MAX_ITEMS", 6)

    async def main(session: Session) -> None:
        said = []
        for i in range(5):
            said.append(await session.say(f"{i}" * 10))
            await session.respond()
        deleted = [event.item_id for event in session.events if event.type == "conversation.item.deleted"]
        assert [each.id for each in said[:2]] == deleted[::2] and len(deleted) == 4
        await session.configure(truncation="disabled")
        await session.create({"type": "input_text", "text": "more"})
        assert (await session.error()).code == "item_limit_exceeded"
        await session.configure(truncation="auto")
        await session.create({"type": "input_text", "text": "x" * 600})
        await session.until("conversation.item.done")
        await session.create({"type": "input_text", "text": "x" * 1100})
        assert (await session.error()).code == "text_limit_exceeded"

    converse(session_app(FakeChat(), max_realtime_text_bytes=1000), main, model="fake")


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


@pytest.mark.parametrize("output", [TEXT, SPEECH], ids=["text", "speech"])
def test_a_conversation_longer_than_the_context(realtime_app: FastAPI, output: Any) -> None:
    """Every turn is answered, as in a new session with the items that are left."""

    async def main(url: str) -> None:
        history: list[Any] = []
        async with opened(url) as session:
            for i in range(12):
                history.append(message("user", f"{i} " + "sea " * 150))
                await session.say(history[-1]["content"][0]["text"])
                events = await session.respond(**output)
                response = events[-1].response
                assert response.status in ("completed", "incomplete"), response.status_details
                assert response.usage.input_tokens + 8 <= 1024
                history.append(message("assistant", said(response)))
            assert not any(event.type == "conversation.item.deleted" for event in session.events)
        async with opened(url) as fresh:
            await fresh.configure(truncation="disabled")
            fitting, num_kept = None, -2
            while again := await fresh.respond(conversation="none", input=history[num_kept:-1], **output):
                if again[-1].response.status == "failed" or again[-1].response.usage.input_tokens + 8 > 1024:
                    break
                fitting, num_kept = again, num_kept - 2
            assert fitting is not None and -20 < num_kept < -4
            assert fitting[-1].response.usage.input_tokens == response.usage.input_tokens
            assert said(fitting[-1].response) == said(response)
            if output is SPEECH:
                assert_sounds_like(speech_of(fitting), speech_of(events))

    visit(realtime_app, main)


def said(response: Any) -> str:
    part = response.output[0].content[0]
    return part.text if part.type == "output_text" else part.transcript


def test_more_sound_than_the_context_and_a_session_keep(realtime_app: FastAPI) -> None:
    """Each turn is sound, and answered aloud; the last one as in a new session with the items that are left."""
    sounds = [np.random.default_rng(i).integers(-9000, 9000, 24_000 * 8, np.int16) for i in range(12)]

    async def main(url: str) -> None:
        async with opened(url) as session:
            items = []
            for sound in sounds:
                items.append(await session.speak(sound))
                events = await session.respond(**SPEECH)
                response = events[-1].response
                assert response.status in ("completed", "incomplete"), response.status_details
            gone = {event.item_id for event in session.events if event.type == "conversation.item.deleted"}
            assert gone == {each.id for each in items[:-3]}  # 24 of 30 seconds.
            answers = [event.response for event in session.events if event.type == "response.done"]
        async with opened(url) as fresh:
            for sound, answer in zip(sounds[-3:], [*answers[-3:-1], None], strict=True):
                await fresh.speak(sound)
                if answer is not None:
                    await fresh.connection.conversation.item.create(item=message("assistant", said(answer)))
                    await fresh.until("conversation.item.done")
            again = await fresh.respond(**SPEECH)
            assert again[-1].response.usage.input_tokens == response.usage.input_tokens
            assert said(again[-1].response) == said(response)
            assert_sounds_like(speech_of(again), speech_of(events))

    visit(with_flags(realtime_app, "--max-realtime-audio-s=30"), main)
