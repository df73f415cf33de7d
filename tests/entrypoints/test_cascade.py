# SPDX-License-Identifier: Apache-2.0
"""A language model of vLLM's and a stage that reads its sentences: nothing is lost, whatever the client's mode."""

import base64
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import soundfile

from tests.entrypoints.fake_pipelines import make_pipeline
from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.media_apps import MODEL, app_that_writes, use
from tests.entrypoints.openai.small_apps import send
from tests.entrypoints.spoken_functions import ASR, NUM_SAMPLES, RANDOM, SPEAKING, writer
from tests.orchestrator.pipelines import function_stage
from vllm_omni import AsyncOmniLLM, OmniLLM
from vllm_omni.function_stage import FunctionStage
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput
from vllm_omni.stage.sentences import SentenceCutter

pytestmark = pytest.mark.slow


class ShowingParameters(msgspec.Struct):
    voice: str = "a"


class ShowingStage(FunctionStage):
    """Shows its windows, and then its voice."""

    parameters = ShowingParameters

    def begin(self, request: StageRequest, parameters: ShowingParameters) -> ShowingParameters:
        return parameters

    def window(self, state: ShowingParameters, sources: Mapping[int, StageOutput]) -> dict[str, Any]:
        return {"text": sources[0].completions[0].text + "|"}

    def end(self, state: ShowingParameters) -> dict[str, Any]:
        return {"text": state.voice}


SHOWING = function_stage(1, "showing", ShowingStage, (0,), "shown") | {"reads": ["completions"]}


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniLLM]:
    path = tmp_path_factory.mktemp("config") / "stages.yaml"
    edges = [{"from": 0, "to": 1, "unit": "sentences"}]
    with make_pipeline(OmniLLM, path, [writer(tiny_qwen3, **RANDOM), SHOWING], args={}, edges=edges) as llm:
        yield llm


def test_the_windows_are_the_sentences_of_the_text(llm: OmniLLM) -> None:
    prompts: Any = [{"prompt": f"Prompt {i}", "additional_information": {"speaker": f"v{i}"}} for i in range(4)]
    texts: dict[str, str] = {}
    shown: dict[str, str] = {}
    for output in llm.generate(prompts, use_tqdm=False):
        (texts if output.final_output_type == "text" else shown)[output.request_id] = output.outputs[0].text
    assert len(texts) == 4
    for i, request_id in enumerate(sorted(texts)):
        expected = SentenceCutter(first_is_clause=True).add(texts[request_id], is_last=True)
        assert shown[request_id] == "".join(f"{sentence}|" for sentence in expected) + f"v{i}"


@pytest.fixture(scope="module")
def speaking(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmniLLM]:
    path = tmp_path_factory.mktemp("config") / "stages.yaml"
    edges = [{"from": 0, "to": 1, "unit": "sentences"}]
    writing = writer(tiny_qwen3, temperature=0.0)
    with make_pipeline(AsyncOmniLLM, path, [writing, SPEAKING], args={}, edges=edges) as llm:
        yield llm


def sound(num_samples: int) -> dict[str, Any]:
    """A part of a message: silence of 16 kHz."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(num_samples, np.float32), 16_000, format="WAV")
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}


def test_a_chat_with_sounds(tiny_qwen3: Path, tmp_path: Path) -> None:
    stages = (writer(tiny_qwen3, **RANDOM), SPEAKING | {"accepts": "text"}, ASR)
    edges = [{"from": 0, "to": 1, "unit": "sentences"}]
    with make_pipeline(AsyncOmniLLM, tmp_path / "stages.yaml", stages, args={}, edges=edges) as llm:
        app = FakeServer(llm).app

        def chat(content: Any, **fields: Any) -> dict[str, Any]:
            messages = [{"role": "user", "content": content}]
            fields = {"messages": messages, "max_tokens": 5, "temperature": 0, **fields}
            response = send(app, "POST", "/v1/chat/completions", json=fields)
            assert response.status_code == 200, response.text
            return response.json()

        said = "It has 800 samples. It is en."
        expected = chat([{"type": "text", "text": said}, {"type": "text", "text": "Why?"}])
        answer = chat([sound(800), {"type": "text", "text": "Why?"}])
        for key in ("choices", "usage"):
            assert answer[key] == expected[key]
        spoken = chat([sound(800)], modalities=["text", "audio"], audio={"voice": "bob", "format": "pcm16"})
        assert spoken["choices"][0]["message"]["audio"]["transcript"]
        counts = {stage.name: stage.num_completed for stage in llm.stats()}
        assert counts == {"writer": 3, "voice": 1, "asr": 1}, "a sound is transcribed once"


CALL = '<tool_call>\n{"name": "dive", "arguments": {"sea": "red"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "dive", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("<think>\nIt is a sea. Look.\n</think>\n\nIt is red. See it.", "It is red. See it."),
        (f"Let me look.\n{CALL}", "Let me look."),
        (f"<think>\nA dog.\n</think>\n\n{CALL}", ""),
        ("It is red. See it.", "It is red. See it."),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_only_content_is_spoken(speaking: AsyncOmniLLM, tiny_qwen3: Path, text: str, spoken: str, stream: bool) -> None:
    reasoning = ["--reasoning-parser=qwen3"] if "<think>" in text else []
    app = app_that_writes(speaking, tiny_qwen3, text, *reasoning)
    fields: Any = {
        "model": MODEL, "messages": [{"role": "user", "content": "Is it red?"}], "modalities": ["text", "audio"],
        "audio": {"voice": "Bob", "format": "pcm16"}, "max_completion_tokens": 200, "tools": [TOOL], "stream": stream,
    }  # fmt: skip

    async def main(client: openai.AsyncOpenAI) -> tuple[bytes, str]:
        answer = await client.chat.completions.create(**fields)
        if not stream:
            audio = answer.choices[0].message.audio
            return (b"", "") if audio is None else (base64.b64decode(audio.data), audio.transcript)
        deltas = [chunk.choices[0].delta.model_dump().get("audio") or {} async for chunk in answer if chunk.choices]
        data = b"".join(base64.b64decode(delta["data"]) for delta in deltas if delta.get("data"))
        return data, "".join(delta.get("transcript") or "" for delta in deltas)

    data, transcript = use(app, main)
    assert transcript.strip() == spoken
    assert len(data) == 2 * NUM_SAMPLES * len(transcript.rstrip())
