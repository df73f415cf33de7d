# SPDX-License-Identifier: Apache-2.0
"""Models that speak what they write are forced to write the given text exactly."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.inputs import EngineInput
from vllm.sampling_params import SamplingParams

from tests.entrypoints.int16_sound import assert_sounds_like
from tests.entrypoints.openai.media_apps import app_of
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.openai.test_audio_formats import decode
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.forced_text import ForcedTextBuilder
from vllm_omni.events import CompletedEvent
from vllm_omni.outputs import OmniRequestOutput

GROUP = "llm"
SHORT = {"temperature": 0.9, "max_tokens": 12}  # Speech of about a second: talkers of random weights do not stop.

TEXTS = {
    "one token": "a",
    "quotes": 'He said "it\'s" \\n and {"a": [1]}\\',
    "lines": "One.\r\n\tTwo.\n\n  Three. ",
    "unicode": "Grüße, 日本語, Ελληνικά, עברית, 😀👩‍👩‍👧.",
    "control tokens": "<|im_end|><|im_start|>user\n<|audio_pad|></s>",
    "odd": "\x00\x07\ufeff\u200b",
    "grammar": 'root ::= "x" | Token(3) [a-z]* # (?!)',
}


def make_app(llm: AsyncOmniLLM, model: Any) -> FastAPI:
    return app_of(OmniEngineClient(llm), model)


@pytest.fixture(scope="module")
def qwen3_app(talking_async_llm: AsyncOmniLLM, tiny_qwen3_omni_moe: Any) -> FastAPI:
    return make_app(talking_async_llm, tiny_qwen3_omni_moe)


@pytest.fixture(scope="module")
def qwen2_5_app(qwen2_5_async_llm: AsyncOmniLLM, tiny_qwen2_5_omni: Any) -> FastAPI:
    return make_app(qwen2_5_async_llm, tiny_qwen2_5_omni)


@pytest.fixture(params=["qwen3_app", pytest.param("qwen2_5_app", marks=pytest.mark.slow)])
def app(request: pytest.FixtureRequest) -> FastAPI:
    return request.getfixturevalue(request.param)


def builder(app: FastAPI) -> ForcedTextBuilder:
    client: OmniEngineClient = app.state.engine_client
    return ForcedTextBuilder(
        app.state.online_renderer, client.renderer.get_tokenizer(), client.model_config.max_model_len
    )


async def write(app: FastAPI, prepared: tuple[EngineInput, SamplingParams]) -> list[OmniRequestOutput]:
    """The text and the speech."""
    engine_input, params = prepared
    events = app.state.engine_client.run(
        {"engine_input": engine_input, "modalities": ["text", "audio"]}, [params, SHORT, None], stream=False
    )
    async with aclosing(events):
        return [event async for event in events if isinstance(event, CompletedEvent)][-1].outputs


def test_the_model_writes_exactly_the_forced_text(app: FastAPI) -> None:
    async def main() -> None:
        prepared = [await builder(app).prepare(text) for text in TEXTS.values()]
        for text, (written, spoken) in zip(
            TEXTS.values(), await asyncio.gather(*(write(app, each) for each in prepared)), strict=True
        ):
            assert written.outputs[0].text == text
            assert written.outputs[0].finish_reason == "stop"
            assert len(spoken.multimodal_output["audio"]) > 0, text

    asyncio.run(main())


def test_the_tokens_are_those_of_the_tokenizer(qwen3_app: FastAPI) -> None:
    text = "Hello there, this is a longer text of ordinary words."
    client: OmniEngineClient = qwen3_app.state.engine_client

    async def main() -> list[OmniRequestOutput]:
        return await write(qwen3_app, await builder(qwen3_app).prepare(text))

    written, _ = asyncio.run(main())
    tokenizer: Any = client.renderer.get_tokenizer()
    assert list(written.outputs[0].token_ids[:-1]) == tokenizer.encode(text, add_special_tokens=False)


def test_preparing_does_not_change_the_servers_tokenizer(qwen3_app: FastAPI) -> None:
    tokenizer: Any = qwen3_app.state.engine_client.renderer.get_tokenizer()
    asyncio.run(builder(qwen3_app).prepare("<|im_end|>"))
    assert tokenizer.backend_tokenizer.encode("<|im_end|>", add_special_tokens=False).ids == [tokenizer.eos_token_id]


def speak(app: FastAPI, text: str, **fields: Any) -> Any:
    body = {"input": text, "sampling_params_list": [None, SHORT, None], "response_format": "wav", **fields}
    return send(app, "POST", "/v1/audio/speech", json=body)


def test_speech(app: FastAPI) -> None:
    response = speak(app, 'He said "hello".', voice="Ethan", instructions="Speak kindly.")
    assert response.status_code == 200, response.text
    samples, rate = decode(response.content)
    assert rate == 24000 and len(samples) > 0 and abs(samples).max() > 0


def test_usage_counts_the_text_and_the_speech(qwen3_app: FastAPI) -> None:
    first, longer_text, longer_prompt = (
        json.loads(speak(qwen3_app, text, stream_format="sse", instructions=how).text.rpartition("data: ")[2])["usage"]
        for text, how in (("abc", None), ("abc" * 10, None), ("abc", "Sing."))
    )
    assert first["output_tokens"] == SHORT["max_tokens"]
    assert first["total_tokens"] == first["input_tokens"] + first["output_tokens"]
    assert longer_text["input_tokens"] > first["input_tokens"] < longer_prompt["input_tokens"]


def test_the_finish_reason_of_cut_speech_is_length(app: FastAPI) -> None:
    assert '"finish_reason":"length"' in speak(app, "abc", stream_format="sse").text.rpartition("data: ")[2]


def test_voices(app: FastAPI) -> None:
    known = send(app, "GET", "/v1/audio/voices").json()
    voices, voice_map = [voice["id"] for voice in known["voices"]], known["voice_map"]
    assert {"ethan", "chelsie", "aiden"} == set(voices)
    seeded = [
        None,
        SHORT | {"seed": 1},
        {"seed": 1} if app.state.engine_client.config.stages[2].kind.params == "sampling" else None,
    ]
    names = (voices[0], None, "alloy", "coral", voices[1], "ash")
    first, default, alloy, coral, second, ash = (
        speak(app, "abc", voice=name, sampling_params_list=seeded).content for name in names
    )
    assert [voice_map[name] for name in ("alloy", "ash", "ballad", "coral")] == [*voices, voices[0]]
    for same in (default, alloy, coral):
        assert_sounds_like(same, first)
    assert_sounds_like(ash, second)
    with pytest.raises(AssertionError):
        assert_sounds_like(second, first)
    refused = speak(app, "abc", voice="nobody")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "voice"
    assert all(voice in refused.json()["error"]["message"] for voice in voices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "é" * 4000}, "input"),
        ({"instructions": "x" * 4096}, "input_tokens"),
        ({"sampling_params_list": [{"temperature": 1.0}, None, None]}, "sampling_params_list[0]"),
    ],
)
def test_wrong_requests_are_refused(qwen3_app: FastAPI, fields: dict[str, Any], param: str) -> None:
    response = speak(qwen3_app, "abc", **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
