# SPDX-License-Identifier: Apache-2.0
"""Anthropic's client, which vLLM installs: answers about a picture, whole and streamed, two turns, and tools."""

import base64
from typing import Any

import anthropic
import pytest

from coloured_shapes.language import COLOURS
from tests.clients.running import KEY
from tests.clients.tasks import Question
from tests.servers import RunningServer

pytestmark = pytest.mark.slow


def test_messages(shapes_server: RunningServer, question: Question) -> None:
    client = anthropic.Anthropic(base_url=shapes_server.url, api_key=KEY, max_retries=0)
    data = base64.b64encode(question.picture.read_bytes()).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    asked = {"role": "user", "content": [picture, {"type": "text", "text": question.text}]}
    settings: dict[str, Any] = {"model": shapes_server.model, "max_tokens": 100}

    answer = client.messages.create(**settings, messages=[asked])
    assert answer.content[0].text == question.answer and answer.stop_reason == "end_turn"
    with client.messages.stream(**settings, messages=[asked]) as stream:
        pieces = list(stream.text_stream)
    assert "".join(pieces) == question.answer and len(pieces) > 1
    turns = [asked, {"role": "assistant", "content": answer.content}, user("How many shapes are there?")]
    assert client.messages.create(**settings, messages=turns).content[0].text == "There are three shapes."
    counted = client.messages.count_tokens(model=settings["model"], messages=[asked])
    assert counted.input_tokens == answer.usage.input_tokens

    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**settings, messages=[asked])


def test_tools(shapes_server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": list(COLOURS)}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    client = anthropic.Anthropic(base_url=shapes_server.url, api_key=KEY, max_retries=0)
    tool = {"name": "highlight", "description": "Highlights the shapes of a colour.", "input_schema": schema}
    settings: dict[str, Any] = {"model": shapes_server.model, "max_tokens": 100, "tools": [tool]}
    settings["tool_choice"] = {"type": "tool", "name": "highlight"}
    asked = user("Highlight the red shapes.")

    answer = client.messages.create(**settings, messages=[asked])
    (call,) = answer.content
    assert answer.stop_reason == "tool_use" and call.name == "highlight" and call.input["colour"] in COLOURS
    with client.messages.stream(**settings, messages=[asked]) as stream:
        streamed = stream.get_final_message()
    assert streamed.stop_reason == "tool_use" and streamed.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "highlighted"}
    turns = [asked, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**settings, messages=turns).stop_reason == "tool_use"

    settings["max_tokens"] = 3
    cut = client.messages.create(**settings, messages=[asked])
    assert cut.stop_reason == "max_tokens" and cut.content[0].input == {}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
