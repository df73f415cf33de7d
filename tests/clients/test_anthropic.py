# SPDX-License-Identifier: Apache-2.0
"""Anthropic's client, which vLLM installs: answers about a picture, whole and streamed, and two turns."""

import base64
from typing import Any

import anthropic
import pytest

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


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
