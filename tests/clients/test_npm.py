# SPDX-License-Identifier: Apache-2.0
"""Clients in JavaScript: Vercel's AI SDK, and OpenAI's client for Node."""

from pathlib import Path

import pytest

from coloured_shapes.language import split_words
from tests.clients.running import NPM, SPOKEN, run_node_program
from tests.clients.tasks import SENTENCE, Question, says, shows
from tests.servers import RunningServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (NPM / "node_modules").is_dir(), reason="their packages are not installed (`make clients`, which needs npm)"
    ),
]


def test_ai_sdk(shapes_server: RunningServer, painter_server: RunningServer, question: Question, spoken: Path) -> None:
    arguments = (f"{painter_server.url}/v1", question.picture, question.text, question.sound, spoken)
    result = run_node_program("ai_sdk", shapes_server, *arguments)
    assert result["answer"] == question.answer
    assert "".join(result["pieces"]) == question.answer_to_sound
    assert len(result["pieces"]) > 1
    assert says(result["speech"], SENTENCE)
    assert split_words(result["transcript"]) == split_words(result["transcriptOfEnglish"]) == split_words(SPOKEN)
    assert shows(result["painting"], SENTENCE)


def test_openais_client(
    shapes_server: RunningServer, painter_server: RunningServer, question: Question, spoken: Path
) -> None:
    arguments = (f"{painter_server.url}/v1", question.picture, question.text, spoken)
    result = run_node_program("openai_node", shapes_server, *arguments)
    assert result["answer"] == "".join(result["pieces"]) == question.answer
    assert result["response"] == "".join(result["deltas"]) == question.answer
    assert len(result["pieces"]) > 1
    assert says(result["spokenAnswer"], question.answer)
    assert says(result["speech"], SENTENCE)
    assert split_words(result["transcript"]) == split_words(SPOKEN)
    assert shows(result["painting"], SENTENCE)
