# SPDX-License-Identifier: Apache-2.0
"""The example of a model in twenty lines: as its page shows it, in a program, and served."""

import io
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.docs.pages import ROOT, is_answer, snippets
from tests.examples.running import EXAMPLES, read_wav
from tests.forked_programs import ForkedProgram
from tests.servers import RunningServer
from vllm_omni_talk.demo import judge_speech

EXAMPLE = EXAMPLES / "function_tts"
PAGE = ROOT / "docs" / "adding_a_model.md"
TEXT = "Good morning. Water is made of hydrogen and oxygen."
needs_the_voice = pytest.mark.skipif(
    not all(map(find_spec, ("hibari", "pocketsphinx"))), reason="the packages of talk are not installed"
)


@pytest.mark.parametrize(("language", "file"), [("python", "tts.py"), ("yaml", "tts.yaml")])
def test_the_page_shows_the_files(language: str, file: str) -> None:
    code = (EXAMPLE / file).read_text().removeprefix("# SPDX-License-Identifier: Apache-2.0\n")
    assert snippets(language, pages=[PAGE])[0].text == code
    assert len(code.splitlines()) <= 25


@pytest.mark.slow
@needs_the_voice
def test_it_speaks_in_a_program(tmp_path: Path) -> None:
    command = next(snippet for snippet in snippets("bash", pages=[PAGE]) if "say.py" in snippet.text)
    file, output = tmp_path / "speech.wav", tmp_path / "output.txt"
    assert ForkedProgram(EXAMPLE / "say.py", [TEXT, f"--output={file}"], output).wait() == 0, output.read_text()
    is_clear, note = judge_speech(TEXT, read_wav(file) / np.float32(32768))
    assert is_clear, note
    last = output.read_text().splitlines()[-1].replace(str(file), "speech.wav")
    assert command.answer is not None and is_answer(command.answer, last)


@pytest.mark.slow
@needs_the_voice
def test_it_is_served(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": os.pathsep.join([str(EXAMPLE), *sys.path])}
    flags = ("--stage-configs-path", str(EXAMPLE / "tts.yaml"))
    server = RunningServer("tts", *flags, log=tmp_path / "log.txt", env=variables)
    try:
        speech = server.openai().audio.speech
        with pytest.raises(Exception, match="tone"):
            speech.create(model="tts", voice="default", input=TEXT, extra_body={"tone": "glad"})
        answer = speech.create(model="tts", voice="default", input=TEXT, response_format="wav")
        samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
        assert rate == 24_000 and judge_speech(TEXT, samples)[0]
    finally:
        assert server.stop() == 0
