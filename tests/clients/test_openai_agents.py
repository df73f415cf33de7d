# SPDX-License-Identifier: Apache-2.0
"""openai-agents: two turns of an agent with the model for chat completions, about a picture, the second streamed."""

import pytest

from tests.clients.running import run_program
from tests.clients.tasks import Question
from tests.servers import RunningServer

pytestmark = pytest.mark.slow


def test_two_turns(shapes_server: RunningServer, question: Question) -> None:
    result = run_program("agents_chat", shapes_server, question.picture, question.text)
    assert result["answer"] == question.answer
    assert result["last"] == "".join(result["pieces"]) == "There are three shapes."
    assert len(result["pieces"]) > 1
