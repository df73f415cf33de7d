# SPDX-License-Identifier: Apache-2.0
"""Grammars and sequences of a request are limited, a wrong grammar is the client's error; the next request works."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.media_apps import TOOL_FLAGS, with_flags
from tests.entrypoints.openai.small_apps import send

GROUP = "llm"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0.0, "max_tokens": 8}
WORDS = [f"w{i}" for i in range(6000)]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {word: {"type": "string"} for word in WORDS}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
LOOP = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}


@pytest.fixture(autouse=True)
def _the_next_request_is_answered(text_app: FastAPI) -> Iterator[None]:
    yield
    response = chat(text_app, structured_outputs={"choice": ["yes"]})
    assert response.json()["choices"][0]["message"]["content"] == "yes", response.text


def chat(app: FastAPI, **fields: Any) -> Any:
    return send(app, "POST", "/v1/chat/completions", json={**CHAT, **fields})


def error_of(response: Any) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"structured_outputs": {"choice": WORDS}}, "--max-grammar-values"),
        ({"structured_outputs": {"choice": ["a" * 70000]}}, "--max-grammar-bytes"),
        ({"structured_outputs": {"regex": "|".join(WORDS)}}, "--max-grammar-values"),
        ({"structured_outputs": {"grammar": "root ::= " + "|".join(f'"{word}"' for word in WORDS)}}, "--max-grammar-"),
        ({"structured_outputs": {"json": {"enum": WORDS}}}, "--max-grammar-values"),
        ({"structured_outputs": {"json": json.dumps({"enum": WORDS})}}, "--max-grammar-values"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "--max-grammar-",
        ),
        ({"sampling_params_list": [{"structured_outputs": {"choice": WORDS}}]}, "--max-grammar-values"),
        ({"n": 129, "temperature": 1.0}, "--max-n"),
        ({"n": 129, "use_beam_search": True}, "--max-n"),
    ],
)
def test_what_costs_too_much_is_refused(text_app: FastAPI, fields: dict[str, Any], flag: str, stream: bool) -> None:
    if stream and fields.get("use_beam_search"):
        pytest.skip("vLLM does not stream beam search")
    assert flag in error_of(chat(text_app, stream=stream, **fields))["message"]


def test_completions_are_limited_too(text_app: FastAPI) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    for fields, flag in (
        ({"structured_outputs": {"choice": WORDS}}, "--max-grammar-values"),
        ({"n": 129}, "--max-n"),
    ):
        assert flag in error_of(send(text_app, "POST", "/v1/completions", json={**body, **fields}))["message"]


def test_the_limits_are_flags(text_app: FastAPI) -> None:
    small = with_flags(text_app, "--max-grammar-values", "2", "--max-n", "1")
    assert "more than 2 values" in error_of(chat(small, structured_outputs={"choice": ["a", "b", "c"]}))["message"]
    assert error_of(chat(small, n=2, temperature=1.0))["param"] == "n"
    tools = with_flags(text_app, *TOOL_FLAGS)
    assert "--max-grammar-" in error_of(chat(tools, tools=TOOLS, tool_choice="required"))["message"]
    large = with_flags(text_app, "--max-grammar-values", "10000")
    answer = chat(large, structured_outputs={"choice": [f"x{word}" for word in WORDS]})
    assert answer.json()["choices"][0]["message"]["content"][1:] in WORDS, answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": LOOP},
        {"structured_outputs": {"json": {"$ref": "#"}}},
        {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}},
        {"structured_outputs": {"grammar": 'root ::= "a" b\nb ::= b'}},
        {"structured_outputs": {"regex": "[ab"}},
    ],
)
def test_a_grammar_that_matches_no_text_is_the_clients_error(
    text_app: FastAPI, fields: dict[str, Any], stream: bool
) -> None:
    response = chat(text_app, stream=stream, **fields)
    if response.status_code == 200:  # The first token has left already.
        assert stream and '"code":400' in response.text.replace(" ", ""), response.text
    else:
        error_of(response)


def test_logit_bias_of_each_stage(omni_app: FastAPI) -> None:
    body: dict[str, Any] = {"modalities": ["text", "audio"]}

    def ask(*stages: Any) -> Any:
        return chat(omni_app, **body, sampling_params_list=list(stages))

    thinker, talker = {"logit_bias": {"17": 100}}, {"logit_bias": {"5": -100}, "max_tokens": 4}
    answer = ask(thinker, talker, None)
    assert answer.status_code == 200, answer.text
    plain = ask(None, {"max_tokens": 4}, None).json()["choices"][0]["message"]
    assert answer.json()["choices"][0]["message"]["audio"]["transcript"] != plain["audio"]["transcript"]
    for wrong in ({"a": 1}, {"5": "b"}, [5], {"99999999": 1}):
        assert "logit_bias" in error_of(ask(None, {"logit_bias": wrong, "max_tokens": 4}, None))["message"], wrong
        assert "logit_bias" in error_of(ask({"logit_bias": wrong}, {"max_tokens": 4}, None))["message"], wrong
