# SPDX-License-Identifier: Apache-2.0
"""A call of a tool that ends at the limit of tokens: what there is of it, and why it ends, in each API of text."""

import re
from typing import Any

import anthropic
import openai
import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.media_apps import MODEL, use, with_flags
from tests.entrypoints.openai.test_responses import messages, user
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.messages import OmniServingMessages
from vllm_omni.vllm_protocol import ChatCompletionResponse

GROUP = "llm"
NAME, NUM_TOKENS = "dive", 120
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"is_deep": {"type": "boolean"}, "why": {"type": "string"}},
    "required": ["is_deep", "why"],
    "additionalProperties": False,
}
ASKED = user("Why is the sea blue?")
MESSAGE: dict[str, Any] = {
    "model": MODEL, "max_tokens": NUM_TOKENS, "tools": [{"name": NAME, "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": NAME}, "extra_body": {"temperature": 0.0},
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0.0,
    "tools": [{"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": NAME}},
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "model": MODEL, "max_output_tokens": NUM_TOKENS, "temperature": 0.0,
    "tools": [{"type": "function", "name": NAME, "parameters": SCHEMA}],
    "tool_choice": {"type": "function", "name": NAME},
}  # fmt: skip


@pytest.fixture(scope="module")
def app(omni_app: FastAPI) -> FastAPI:
    return with_flags(omni_app, "--enable-auto-tool-choice", "--tool-call-parser=pythonic")


def is_cut(arguments: str) -> bool:
    return re.fullmatch(r'\{\s*"is_deep":\s*(true|false),\s*"why":\s*"[^"}]*', arguments) is not None


class TestMessages:
    @pytest.mark.parametrize("is_streamed", [False, True])
    def test_the_limit(self, app: FastAPI, is_streamed: bool) -> None:
        async def ask(client: anthropic.AsyncAnthropic, turns: list[Any]) -> Any:
            if not is_streamed:
                return await client.messages.create(messages=turns, **MESSAGE)
            async with client.messages.stream(messages=turns, **MESSAGE) as stream:
                return await stream.get_final_message()

        answer = messages(app, lambda client: ask(client, [ASKED]))
        (call,) = answer.content
        assert (call.type, call.name, answer.stop_reason) == ("tool_use", NAME, "max_tokens")
        assert list(call.input) == ["is_deep"], "the value that was cut is not there"

        result = {"type": "tool_result", "tool_use_id": call.id, "is_error": True, "content": "why?"}
        turns = [ASKED, {"role": "assistant", "content": answer.content}, user([result])]
        assert messages(app, lambda client: ask(client, turns)).stop_reason == "max_tokens"

    def test_a_stop_sequence(self, app: FastAPI) -> None:
        asked = {**MESSAGE, "stop_sequences": ["why"]}
        answer = messages(app, lambda client: client.messages.create(messages=[ASKED], **asked))
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "why"), "a call that is cut must not run"
        assert list(answer.content[0].input) == ["is_deep"]

    def test_any_tool(self, app: FastAPI) -> None:
        asked = {**MESSAGE, "tool_choice": {"type": "any"}}
        answer = messages(app, lambda client: client.messages.create(messages=[ASKED], **asked))
        assert answer.stop_reason == "max_tokens"

    @pytest.mark.parametrize("arguments", ["[1, ", "dive"])
    def test_what_is_no_object_is_the_models_error(self, arguments: str) -> None:
        call = {"id": "call", "type": "function", "function": {"name": NAME, "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = ChatCompletionResponse.model_validate({"model": MODEL, "choices": [choice], "usage": usage})
        with pytest.raises(OmniHTTPError, match="`dive` with arguments that are not a JSON object") as caught:
            OmniServingMessages.messages_full_converter(OmniServingMessages.__new__(OmniServingMessages), answer)
        assert caught.value.http_status == 500


class TestChat:
    def test_the_limit(self, app: FastAPI) -> None:
        async def stream(client: openai.AsyncOpenAI) -> tuple[str, Any]:
            chunks = [each async for each in await client.chat.completions.create(messages=[ASKED], **asked)]
            choices = [choice for chunk in chunks for choice in chunk.choices]
            calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
            return "".join(call.function.arguments or "" for call in calls), choices[-1].finish_reason

        asked = {**CHAT, "stream": True}
        (choice,) = use(app, lambda client: client.chat.completions.create(messages=[ASKED], **CHAT)).choices
        (call,) = choice.message.tool_calls or ()
        assert is_cut(call.function.arguments) and choice.finish_reason == "length"
        assert use(app, stream) == (call.function.arguments, "length")

        result = {"role": "tool", "tool_call_id": call.id, "content": "why?"}
        turns: list[Any] = [ASKED, choice.message, result]
        assert use(app, lambda client: client.chat.completions.create(messages=turns, **CHAT)).choices


class TestResponses:
    @pytest.mark.parametrize("is_streamed", [False, True])
    def test_the_limit(self, app: FastAPI, is_streamed: bool) -> None:
        async def ask(client: openai.AsyncOpenAI, given: list[Any], **fields: Any) -> Any:
            if not is_streamed:
                return await client.responses.create(input=given, **fields, **RESPONSE)
            async with client.responses.stream(input=given, **fields, **RESPONSE) as stream:
                return [event async for event in stream][-1].response

        answer = use(app, lambda client: ask(client, [ASKED]))
        (call,) = answer.output
        assert call.type == "function_call" and is_cut(call.arguments)
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"

        result = {"type": "function_call_output", "call_id": call.call_id, "output": "why?"}
        assert use(app, lambda client: ask(client, [ASKED, call, result])).status == "incomplete"
        assert use(app, lambda client: ask(client, [result], previous_response_id=answer.id)).status == "incomplete"


def test_a_whole_call(app: FastAPI) -> None:
    schema = {**SCHEMA, "properties": {"is_deep": {"type": "boolean"}}, "required": ["is_deep"]}
    asked = {**MESSAGE, "tools": [{"name": NAME, "input_schema": schema}]}
    answer = messages(app, lambda client: client.messages.create(messages=[ASKED], **asked))
    assert answer.stop_reason == "tool_use" and list(answer.content[0].input) == ["is_deep"]
