# SPDX-License-Identifier: Apache-2.0
"""openai-agents: two turns of an agent about a picture, the second streamed, and one with a tool, by the Responses API
and by chats."""

import pytest

from coloured_shapes.language import COLOURS
from tests.clients.running import run_program
from tests.clients.tasks import Question
from tests.servers import RunningServer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_turns(shapes_server: RunningServer, question: Question, api: str) -> None:
    result = run_program("agents_chat", shapes_server, question.picture, question.text, api)
    assert result["answer"] == question.answer
    assert result["last"] == "".join(result["pieces"]) == "There are three shapes."
    assert len(result["pieces"]) > 1
    (colour,) = result["highlighted"]
    assert colour in COLOURS and result["after_tool"]
