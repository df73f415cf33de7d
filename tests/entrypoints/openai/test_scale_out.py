# SPDX-License-Identifier: Apache-2.0
"""vLLM's paths for rendered prompts, scores of labels and SageMaker: the same tokens and texts as those of the chat."""

import json
from typing import Any

import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.media_apps import MODEL, send, with_flags
from tests.entrypoints.openai.test_openai_client import data_uri, png

GROUP = "llm"
NUM_TOKENS = 8
PICTURE = {"type": "image_url", "image_url": {"url": data_uri("image/png", png())}}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}]}],
    "max_tokens": NUM_TOKENS,
}
COMPLETION = {"model": MODEL, "prompt": "Why is the sea", "max_tokens": NUM_TOKENS, "temperature": 0.0}


@pytest.fixture(scope="module")
def app(omni_app: FastAPI) -> FastAPI:
    return with_flags(omni_app, "--enable-scale-out")


def post(app: FastAPI, path: str, body: Any) -> Any:
    answer = send(app, "POST", path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(app: FastAPI, **fields: Any) -> Any:
    return post(app, "/v1/chat/completions", {**CHAT, "return_token_ids": True, **fields})["choices"][0]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}])
def test_a_rendered_chat_has_the_tokens_and_the_text_of_the_chat(app: FastAPI, settings: dict[str, Any]) -> None:
    expected = chat(app, **settings)
    rendered = post(app, "/v1/chat/completions/render", {**CHAT, **settings})
    generated = post(app, "/inference/v1/generate", rendered)
    assert generated["choices"][0]["token_ids"] == expected["token_ids"]
    derendered = post(
        app, "/v1/chat/completions/derender", {"model": MODEL, "stream": False, "generate_response": generated}
    )
    assert derendered["choices"][0]["message"]["content"] == expected["message"]["content"]


def test_a_stream_has_the_same_tokens(app: FastAPI) -> None:
    rendered = post(app, "/v1/chat/completions/render", {**CHAT, "temperature": 0.0})
    answer = send(app, "POST", "/inference/v1/generate", json={**rendered, "stream": True})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert tokens == chat(app, temperature=0.0)["token_ids"]


def test_completions_and_messages_are_rendered(app: FastAPI) -> None:
    (completion,) = post(app, "/v1/completions/render", COMPLETION)
    token_ids = post(app, "/v1/completions", {**COMPLETION, "return_token_ids": True})["choices"][0]["token_ids"]
    assert post(app, "/inference/v1/generate", completion)["choices"][0]["token_ids"] == token_ids
    message = {"role": "user", "content": "Why?"}
    chat_request = {"model": MODEL, "messages": [message]}
    expected = post(app, "/v1/chat/completions/render", chat_request)["token_ids"]
    assert post(app, "/v1/messages/render", {**chat_request, "max_tokens": 4})["token_ids"] == expected
    assert post(app, "/v1/responses/render", {"model": MODEL, "input": [message]})["token_ids"] == expected


def test_what_a_client_sets_wins_over_the_defaults_of_the_stage(app: FastAPI) -> None:
    rendered = post(app, "/v1/chat/completions/render", {**CHAT, "temperature": 1.0})
    rendered["sampling_params"] |= {"max_tokens": 2, "ignore_eos": True, "n": 2}
    answer = post(app, "/inference/v1/generate", rendered)
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2, 2]
    rendered["sampling_params"]["n"] = 10_000
    refused = send(app, "POST", "/inference/v1/generate", json=rendered)
    assert refused.status_code == 400 and "--max-n" in refused.json()["error"]["message"]


def test_media_that_cannot_be_decoded(app: FastAPI) -> None:
    rendered = post(app, "/v1/chat/completions/render", CHAT)
    for content in ("AAAA", "no base64"):
        rendered["features"]["kwargs_data"] = {"image": [content]}
        error = send(app, "POST", "/inference/v1/generate", json=rendered).json()["error"]
        assert (error["code"], error["param"]) == (400, "features")


def test_aborts_need_ids(app: FastAPI) -> None:
    assert post(app, "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-1"]})["aborted"] == 0
    assert send(app, "POST", "/inference/v1/abort_requests", json={}).status_code == 400


def test_without_the_flag_they_are_closed(omni_app: FastAPI) -> None:
    for path in ("/v1/chat/completions/render", "/inference/v1/generate", "/inference/v1/abort_requests"):
        answer = send(omni_app, "POST", path, json=CHAT)
        assert answer.status_code == 403
        assert "--enable-scale-out" in answer.json()["error"]["message"]


def test_scores_are_the_probabilities_of_the_labels(app: FastAPI) -> None:
    labels = [5, 6]
    query, item = [11, 12, 13], [14]
    body = {"model": MODEL, "query": query, "items": [item], "label_token_ids": labels, "apply_softmax": False}
    score = post(app, "/generative_scoring", body)["data"][0]["score"]
    completion = {"model": MODEL, "prompt": [*query, *item, labels[0]], "max_tokens": 1, "prompt_logprobs": 1}
    last = post(app, "/v1/completions", completion)["choices"][0]["prompt_logprobs"][-1]
    assert score == pytest.approx(2.718281828459045 ** last[str(labels[0])]["logprob"], abs=1e-5)


def test_invocations_are_chats_and_completions(app: FastAPI) -> None:
    text = {**CHAT, "temperature": 0.0}
    answer = post(app, "/invocations", text)
    assert answer["choices"][0]["message"]["content"] == chat(app, temperature=0.0)["message"]["content"]
    completion = post(app, "/v1/completions", COMPLETION)["choices"][0]["text"]
    assert post(app, "/invocations", COMPLETION)["choices"][0]["text"] == completion
    error = send(app, "POST", "/invocations", json={"model": MODEL}).json()["error"]
    assert error["code"] == 400 and error["param"] == "messages" and error["message"].startswith("messages is missing")
    for body in (CHAT, COMPLETION):
        error = send(app, "POST", "/invocations", json={**body, "temperature": "hot"}).json()["error"]
        assert error["code"] == 400 and error["param"] == "temperature", error
