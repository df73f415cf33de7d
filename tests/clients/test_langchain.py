# SPDX-License-Identifier: Apache-2.0
"""LangChain's ChatOpenAI: answers about a picture, whole, streamed and spoken."""

import pytest

from tests.clients.running import run_program
from tests.clients.tasks import Question, says
from tests.servers import RunningServer

pytestmark = pytest.mark.slow


def test_chat(shapes_server: RunningServer, question: Question) -> None:
    result = run_program("langchain_chat", shapes_server, question.picture, question.text)
    assert result["answer"] == "".join(result["pieces"]) == question.answer
    assert len(result["pieces"]) > 1
    assert says(result["speech"], question.answer)
    assert result["tokens"] > 10
