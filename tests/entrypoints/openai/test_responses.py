# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses API, Anthropic's Messages and batches of chats: the texts are those of the chat.

Clients, unmodified, with the application in this process.
"""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import pytest
from fastapi import FastAPI

from tests.entrypoints.fake_pipelines import is_idle
from tests.entrypoints.openai.fake_server import AppRequest
from tests.entrypoints.openai.media_apps import MODEL, app_of, send, use
from tests.entrypoints.openai.test_openai_client import GREEDY as STAGES
from tests.entrypoints.openai.test_openai_client import audio_file, data_uri, png, read, samples_of
from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.entrypoints.openai import responses
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.json_body import num_bytes
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.responses import OwnedStore
from vllm_omni.errors import RequestTimeoutError
from vllm_omni.events import OmniEvent

GROUP = "llm"
QUESTION = "Why is the sea blue?"
NUM_TOKENS = 12
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0}
LONG = "why " * 3000


@pytest.fixture(scope="module")
def app(talking_async_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Path) -> FastAPI:
    return app_of(OmniEngineClient(talking_async_llm), tiny_qwen3_omni_moe)


def chat(app: FastAPI, *messages: Any) -> str:
    async def main(client: openai.AsyncOpenAI) -> str:
        answer = await client.chat.completions.create(messages=list(messages), max_tokens=NUM_TOKENS, **GREEDY)
        return answer.choices[0].message.content or ""

    return use(app, main)


def respond(app: FastAPI, given: Any, **fields: Any) -> Any:
    return use(app, lambda client: client.responses.create(input=given, **GREEDY, **_limited(fields)))


def _limited(fields: dict[str, Any]) -> dict[str, Any]:
    return {"max_output_tokens": NUM_TOKENS, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_chat_is_answered_as_by_the_pipeline_without_a_server(app: FastAPI, talking_llm: OmniLLM) -> None:
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    written, spoken = talking_llm.generate(prompt, STAGES, use_tqdm=False)
    fields: Any = {"modalities": ["text", "audio"], "extra_body": {"sampling_params_list": STAGES}}
    ask = [user(QUESTION)]
    answer = read(use(app, lambda client: client.chat.completions.create(model=MODEL, messages=ask, **fields)))
    assert answer.text == answer.transcript == written.outputs[0].text
    exact = spoken.multimodal_output["audio"].numpy()
    assert np.abs(samples_of(answer.speech) / 32768 - exact).max() < 2 / 32768


class TestResponses:
    def test_whole_and_streamed(self, app: FastAPI) -> None:
        async def main(client: openai.AsyncOpenAI) -> tuple[list[str], str]:
            async with client.responses.stream(input=QUESTION, max_output_tokens=NUM_TOKENS, **GREEDY) as stream:
                events = [event async for event in stream]
                return [event.type for event in events], events[-1].response.output_text

        expected = chat(app, user(QUESTION))
        answer = respond(app, QUESTION)
        assert answer.output_text == expected and answer.usage.output_tokens == NUM_TOKENS
        types, text = use(app, main)
        assert text == expected and types[0] == "response.created"
        assert types[-1] in ("response.completed", "response.incomplete"), "vLLM 0.32 does not say that it was cut"

    def test_media(self, app: FastAPI) -> None:
        picture, sound = data_uri("image/png", png()), audio_file("flac")
        data = {"data": base64.b64encode(sound).decode(), "format": "flac"}
        asked = {"type": "text", "text": "What is this?"}
        expected = chat(
            app,
            user(
                [
                    {"type": "image_url", "image_url": {"url": picture}},
                    {"type": "input_audio", "input_audio": data},
                    asked,
                ]
            ),
        )
        given = [
            user(
                [
                    {"type": "input_image", "image_url": picture},
                    {"type": "input_audio", "input_audio": data},
                    {"type": "input_text", "text": "What is this?"},
                ]
            )
        ]
        assert respond(app, given).output_text == expected
        assert expected != chat(app, user([asked]))
        files = [
            {"type": "input_file", "file_data": picture},
            {"type": "input_file", "file_data": data["data"], "filename": "sound.flac"},
        ]
        assert respond(app, [user([*files, {"type": "input_text", "text": "What is this?"}])]).output_text == expected

    def test_a_second_turn_continues_the_first(self, app: FastAPI) -> None:
        first = respond(app, QUESTION)
        second = respond(app, "And the sky?", previous_response_id=first.id)
        story = [user(QUESTION), {"role": "assistant", "content": first.output_text}, user("And the sky?")]
        assert second.output_text == chat(app, *story)
        assert use(app, lambda client: client.responses.retrieve(second.id)).output_text == second.output_text

    def test_in_the_background(self, app: FastAPI) -> None:
        async def main(client: openai.AsyncOpenAI) -> tuple[str, Any]:
            queued = await client.responses.create(
                input=QUESTION, background=True, max_output_tokens=NUM_TOKENS, **GREEDY
            )
            answer = queued
            while answer.status in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                answer = await client.responses.retrieve(queued.id)
            return queued.status or "", answer

        status, answer = use(app, main)
        assert (status, answer.status, answer.output_text) == ("queued", "incomplete", chat(app, user(QUESTION)))

    def test_a_response_in_the_background_is_cancelled(self, app: FastAPI) -> None:
        async def main(client: openai.AsyncOpenAI) -> tuple[str | None, ...]:
            queued = await client.responses.create(input=QUESTION, background=True, max_output_tokens=900, **GREEDY)
            cancelled = await client.responses.cancel(queued.id)
            return cancelled.status, (await client.responses.retrieve(queued.id)).status

        assert use(app, main) == ("cancelled", "cancelled")

    def test_structured_output(self, app: FastAPI) -> None:
        schema = {
            "type": "object",
            "properties": {"sea": {"enum": ["red"]}},
            "required": ["sea"],
            "additionalProperties": False,
        }
        wanted = {"format": {"type": "json_schema", "name": "sea", "schema": schema, "strict": True}}
        assert json.loads(respond(app, QUESTION, text=wanted, max_output_tokens=100).output_text) == {"sea": "red"}

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (LONG, "maximum context length"),
            ([5], r"input\[0\]"),
            ([user([{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}])], "cannot be read"),
            (
                [user([{"type": "input_audio", "input_audio": {"data": 5}}])],
                r"input\[0\].content\[0\].input_audio.data",
            ),
            ([user([{"type": "nothing"}])], r"input\[0\].content\[0\]"),
            ([user([{"type": "input_file", "file_data": "data:application/pdf;base64,AAAA"}])], "input_file"),
            ([user([{"type": "input_file", "file_data": "AAAA"}])], "input_file of an unknown type"),
            ([user([{"type": "input_file", "file_id": "file-1"}])], "without file_data and file_url"),
        ],
    )
    def test_a_wrong_input(self, app: FastAPI, given: Any, words: str, stream: bool) -> None:
        with pytest.raises(openai.BadRequestError, match=words):
            respond(app, given, stream=stream)

    def test_a_tool_for_pictures(self, app: FastAPI) -> None:
        with pytest.raises(openai.BadRequestError, match="this model cannot paint; it outputs text, audio"):
            respond(app, QUESTION, tools=[{"type": "image_generation"}])

    def test_an_unknown_response(self, app: FastAPI) -> None:
        for call in (
            lambda client: client.responses.retrieve("resp_nothing"),
            lambda client: client.responses.cancel("resp_nothing"),
            lambda client: client.responses.create(input="x", previous_response_id="resp_nothing", model=MODEL),
        ):
            with pytest.raises(openai.NotFoundError, match="resp_nothing"):
                use(app, call)


class TestStore:
    def test_only_the_owner_finds_an_entry(self) -> None:
        async def request(owner: bytes, answer: str | None = None) -> tuple[str | None, list[str]]:
            RequestContext.start().owner = owner
            if answer is not None:
                store["id"] = answer
            return store.get("id"), list(store)

        store = OwnedStore()
        assert asyncio.run(request(b"one", "text")) == ("text", ["id"])
        assert asyncio.run(request(b"two")) == (None, [])

    def test_the_oldest_leave(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(responses, "MAX_STORED", 2)
        monkeypatch.setattr(responses, "MAX_STORED_BYTES", 1000)
        store = OwnedStore()
        for name in ("a", "b", "c"):
            store[name] = name
        assert list(store) == ["b", "c"]
        store["d"] = [{"content": "x" * 500}]
        assert list(store) == ["c", "d"]
        store["e"] = "x" * 1000
        assert list(store) == ["e"], "the newest stays, however large it is"
        store["e"] = "x"
        store["f"] = [1] * 5
        assert list(store) == ["e", "f"], "the earlier value is not counted"
        store["g"] = [1] * 7
        assert list(store) == ["g"], "numbers take memory, too"

    def test_those_of_all_keys_are_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def keep(owner: bytes, name: str) -> list[str]:
            RequestContext.start().owner = owner
            store[name] = "x" * 300
            return list(store)

        monkeypatch.setattr(responses, "MAX_TOTAL_STORED_BYTES", 1000)
        store = OwnedStore()
        assert asyncio.run(keep(b"one", "a")) == ["a"]
        assert asyncio.run(keep(b"one", "b")) == ["a", "b"]
        assert asyncio.run(keep(b"two", "c")) == ["c"]
        assert asyncio.run(keep(b"two", "d")) == ["d"], "its own leave"
        assert asyncio.run(keep(b"one", "e")) == ["e"]
        assert asyncio.run(keep(b"one", "f")) == ["f"]

    def test_the_events_of_a_background_stream_count(self, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
        async def events(request: Any) -> AsyncGenerator[dict[str, str], None]:
            for _ in range(100):
                yield {"delta": "x" * 100}

        handler = app.state.openai_serving_responses
        monkeypatch.setattr(handler, "responses_stream_generator", events)
        monkeypatch.setattr(responses, "MAX_STORED_BYTES", 50_000)
        for name in ("a", "b"):
            asyncio.run(handler._run_background_request_stream(SimpleNamespace(request_id=name)))
        assert list(handler.event_store) == ["b"], "the oldest leave"

    def test_a_response_without_its_messages_cannot_be_continued(self, app: FastAPI) -> None:
        first = respond(app, QUESTION)
        del app.state.openai_serving_responses.msg_store[first.id]
        with pytest.raises(openai.NotFoundError, match=first.id):
            respond(app, "And the sky?", previous_response_id=first.id)

    def test_calls_of_an_earlier_response_are_repeated(self, app: FastAPI) -> None:
        from openai.types.responses import ResponseFunctionToolCall

        handler = app.state.openai_serving_responses
        call = ResponseFunctionToolCall(call_id="call", name="look", arguments="{}", type="function_call")
        handler.response_store["resp"] = SimpleNamespace(output=[call])
        assert handler._earlier_calls("resp") == [call] and handler._earlier_calls(None) == []
        del handler.response_store["resp"]

    def test_sizes(self) -> None:
        assert num_bytes([{"a": "xx", "b": ["y", 5, None]}]) == 703


def messages(app: FastAPI, main: Callable[[anthropic.AsyncAnthropic], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as http:
            client = anthropic.AsyncAnthropic(base_url="http://server", api_key="none", max_retries=0, http_client=http)
            return await main(client)

    return asyncio.run(run())


ASKED: dict[str, Any] = {
    "model": MODEL, "max_tokens": NUM_TOKENS, "messages": [user(QUESTION)], "extra_body": {"temperature": 0.0},
}  # fmt: skip


class TestMessages:
    def test_whole_and_streamed(self, app: FastAPI) -> None:
        async def stream(client: anthropic.AsyncAnthropic) -> str:
            async with client.messages.stream(**ASKED) as answer:
                return "".join([text async for text in answer.text_stream])

        expected = chat(app, user(QUESTION))
        answer = messages(app, lambda client: client.messages.create(**ASKED))
        assert answer.content[0].text == expected and answer.stop_reason == "max_tokens"
        assert messages(app, stream) == expected
        counted = messages(app, lambda client: client.messages.count_tokens(model=MODEL, messages=[user(QUESTION)]))
        assert counted.input_tokens == answer.usage.input_tokens

    def test_a_picture(self, app: FastAPI) -> None:
        data = base64.b64encode(png()).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
        answer = messages(app, lambda client: client.messages.create(**{**ASKED, "messages": [user(content)]}))
        picture = {"type": "image_url", "image_url": {"url": data_uri("image/png", png())}}
        assert answer.content[0].text == chat(app, user([picture, content[1]]))

    @pytest.mark.parametrize("stream", [False, True])
    def test_errors_have_its_form(self, app: FastAPI, stream: bool) -> None:
        asked = {**ASKED, "stream": stream}
        for wrong, kind, words in (
            ({"messages": [user(LONG)]}, "invalid_request_error", "maximum context length"),
            ({"messages": [user([{"type": "nothing"}])]}, "invalid_request_error", "messages[0].content[0].type"),
            ({"model": "nothing"}, "not_found_error", "`nothing`"),
        ):
            with pytest.raises(anthropic.APIStatusError) as caught:
                messages(app, lambda client, wrong=wrong: client.messages.create(**{**asked, **wrong}))
            body: Any = caught.value.body
            assert body["type"] == "error" and body["error"]["type"] == kind and words in body["error"]["message"]

    @pytest.mark.parametrize("is_streamed", [False, True])
    def test_without_thinking(self, app: FastAPI, is_streamed: bool) -> None:
        """vLLM renders prompts of its own, to find how a model is told not to."""

        async def ask(client: anthropic.AsyncAnthropic) -> str:
            if not is_streamed:
                return (await client.messages.create(**asked)).content[0].text
            async with client.messages.stream(**asked) as answer:
                return await answer.get_final_text()

        asked = {**ASKED, "thinking": {"type": "disabled"}}
        assert messages(app, ask) == chat(app, user(QUESTION))

    def test_an_error_in_a_stream(
        self, app: FastAPI, talking_async_llm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[OmniEvent, None]:
            async with aclosing(AsyncOmniLLM.generate(talking_async_llm, *args, **kwargs)) as events:
                first = await anext(events)
            yield first
            raise RequestTimeoutError("too late", request_id=first.request_id)

        async def stream(client: anthropic.AsyncAnthropic) -> None:
            async with client.messages.stream(**ASKED) as answer:
                async for text in answer.text_stream:
                    texts.append(text)

        texts: list[str] = []
        monkeypatch.setattr(talking_async_llm, "generate", generate)
        with pytest.raises(anthropic.APIStatusError, match="too late") as caught:
            messages(app, stream)
        body: Any = caught.value.body
        assert texts and body["type"] == "error" and body["error"]["type"] == "api_error"

    def test_a_client_abort_of_a_stream_ends_its_request(self, app: FastAPI, talking_async_llm: AsyncOmniLLM) -> None:
        async def main() -> None:
            body = {"model": MODEL, "max_tokens": 900, "messages": [user(QUESTION)], "stream": True}
            request = AppRequest(app, "/v1/messages", body)
            await request.first_chunk()
            assert request.status == 200 and any(talking_async_llm._pipeline.orchestrator.activity().values())
            await request.disconnect()
            assert is_idle(talking_async_llm)

        asyncio.run(main())


class TestBatch:
    def test_the_answers_are_those_of_chats(self, app: FastAPI) -> None:
        asked = [[user(QUESTION)], [user("And the sky?")]]
        body = {**GREEDY, "messages": asked, "max_tokens": NUM_TOKENS}
        answer = send(app, "POST", "/v1/chat/completions/batch", json=body)
        texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
        assert texts == [chat(app, *conversation) for conversation in asked]

    def test_too_many(self, app: FastAPI) -> None:
        body = {**GREEDY, "messages": [[user("x")]] * 129}
        answer = send(app, "POST", "/v1/chat/completions/batch", json=body)
        assert answer.status_code == 400 and "129 conversations" in answer.json()["error"]["message"]
