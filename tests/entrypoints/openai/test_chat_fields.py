# SPDX-License-Identifier: Apache-2.0
"""Fields of OpenAI's chat that clients send and that mean nothing here: accepted by every kind of pipeline."""

from typing import Any

import openai
import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.media_apps import MODEL, use, with_flags

GROUP = "llm"
FIELDS: dict[str, Any] = {
    "metadata": {"conversation": "1"},
    "service_tier": "flex",
    "prompt_cache_key": "user-1",
    "prompt_cache_retention": "24h",
    "safety_identifier": "user-1",
    "verbosity": "low",
    "store": True,
    "user": "user-1",
}
TEXT: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
SPEECH: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"format": "pcm16", "voice": "alloy"},
    "extra_body": {"sampling_params_list": [{"max_tokens": 6}, {"temperature": 0.0, "max_tokens": 6}, None]},
    "temperature": 0.0,
}
BLOCK_SIZE = 32
IMAGE: dict[str, Any] = {"extra_body": {"height": 32, "width": 32, "num_inference_steps": 2, "seed": 1}}


def answer(app: FastAPI, stream: bool, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client gets, without ids and times: one message, or the deltas of a stream."""

    async def main(client: openai.AsyncOpenAI) -> list[dict[str, Any]]:
        request: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **fields}
        got: Any = await client.chat.completions.create(stream=stream, **request)
        if not stream:
            return [got.choices[0].message.model_dump()]
        return [choice.delta.model_dump() async for chunk in got for choice in chunk.choices]

    return [without_ids(message) for message in use(app, main)]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    if audio := message.get("audio"):
        message["audio"] = {name: audio[name] for name in ("data", "transcript") if audio.get(name)}
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("app_name", "settings"), [("omni_app", SPEECH), ("text_app", TEXT), ("omni_app", TEXT), ("image_app", IMAGE)]
)
def test_fields_without_meaning_change_nothing(
    request: pytest.FixtureRequest, app_name: str, settings: dict[str, Any], stream: bool
) -> None:
    app = request.getfixturevalue(app_name)
    plain, given = (answer(app, stream, {**settings, **more}) for more in ({}, FIELDS))
    assert joined(plain) == joined(given) != {}


@pytest.mark.parametrize("stream", [False, True])
def test_usage_has_the_tokens_that_were_cached(text_app: FastAPI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": f"{'streamed' if stream else 'whole'}, " * 20}]
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}

    async def main(client: openai.AsyncOpenAI) -> int:
        got: Any = await client.chat.completions.create(
            model=MODEL, messages=messages, stream=stream, max_tokens=1, **options
        )
        for chunk in [chunk async for chunk in got] if stream else [got]:
            usage = chunk.usage
        return usage.prompt_tokens_details.cached_tokens

    app = with_flags(text_app, "--enable-prompt-tokens-details")
    assert use(app, main) == 0
    num_cached = use(app, main)
    assert num_cached > 0 and num_cached % BLOCK_SIZE == 0


def joined(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The text, the speech and the pictures of all parts."""
    found: dict[str, Any] = {}
    for message in messages:
        for name in ("content", "images"):
            if message.get(name):
                found[name] = found[name] + message[name] if name in found else message[name]
        for name, value in (message.get("audio") or {}).items():
            found[name] = found.get(name, "") + value
    return found
