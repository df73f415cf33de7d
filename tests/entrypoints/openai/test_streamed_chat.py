# SPDX-License-Identifier: Apache-2.0
"""Streamed answers: the audio of their lines, their typed deltas, and clients that are slow."""

import asyncio
import base64
import io
import json
import wave
from collections.abc import AsyncGenerator, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.outputs import CompletionOutput, RequestOutput

from tests.entrypoints.openai.audio_stage import AUDIO_STAGE, RATE
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.entrypoints.openai.audio_formats import BrokenAudioError
from vllm_omni.entrypoints.openai.chat_media import Transcripts
from vllm_omni.entrypoints.openai.request_context import PrefetchedStream, RequestContext, RequestOptions
from vllm_omni.entrypoints.openai.sse import DONE, ErrorLine
from vllm_omni.entrypoints.openai.streamed_chat import MAX_UNSENT_BYTES, ChatDelta, DeltaStream, MediaStream
from vllm_omni.events import ARSegmentEvent, CompletedEvent
from vllm_omni.outputs import Completion, OmniRequestOutput, StageOutput

FAILED = {"error": {"message": "it failed", "code": 500}}


class Speech:
    """A streamed answer of 100 pieces of a second of speech.

    Attributes:
        num_made: How many pieces were taken from the pipeline.
        is_closed: Whether its request has ended.
    """

    def __init__(self) -> None:
        self.num_made, self.is_closed = 0, False
        config: Any = SimpleNamespace(stages={1: SimpleNamespace(sample_rate=24_000)})
        options = RequestOptions(modalities=("text", "audio"), audio_format="pcm16")
        media = MediaStream(self._pieces(), "r", "model", RequestContext(options=options), config, Transcripts())
        self.lines = media.answer(self._silent(media.text()))

    async def _pieces(self) -> AsyncGenerator[ARSegmentEvent, None]:
        try:
            for self.num_made in range(1, 101):
                yield ARSegmentEvent(
                    request_id="r", sequence=0, ts=0.0, stage_id=1, final_output_type="audio",
                    multimodal_output={"audio": torch.zeros(24_000)},
                )  # fmt: skip
        finally:
            self.is_closed = True

    async def _silent(self, text: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        async for _ in text:
            yield ""


def test_a_stream_is_made_only_as_far_as_its_client_reads() -> None:
    async def main() -> None:
        speech = Speech()
        first = await anext(speech.lines)
        num_made = 0
        while num_made != speech.num_made:  # until no more is made
            num_made = speech.num_made
            for _ in range(100):
                await asyncio.sleep(0)
        assert num_made <= 3 + MAX_UNSENT_BYTES // len(first) and not speech.is_closed
        assert len([line async for line in speech.lines]) == 99
        assert speech.num_made == 100 and speech.is_closed

    asyncio.run(main())


def test_a_stream_whose_client_has_gone_is_closed() -> None:
    async def main() -> None:
        speech = Speech()
        await anext(speech.lines)
        await speech.lines.aclose()
        assert speech.is_closed

    asyncio.run(main())


def stream_audio(*pieces: torch.Tensor, format: str = "wav") -> list[dict[str, Any]]:
    """The chunks of a streamed answer whose final stage yields these pieces."""

    async def events() -> AsyncGenerator[Any, None]:
        nothing = CompletionOutput(0, "", [], None, None, finish_reason="stop")
        at = {"request_id": "r", "sequence": 0, "ts": 0.0}
        yield RequestOutput("r", None, [1], None, [nothing], finished=True)
        for piece in pieces:
            yield ARSegmentEvent(**at, stage_id=0, final_output_type="audio", multimodal_output={"audio": piece})
        output = StageOutput(request_id="r", stage_id=0)
        yield CompletedEvent(**at, outputs=[OmniRequestOutput("r", output, "audio", [])])

    async def main() -> list[dict[str, Any]]:
        options = RequestOptions(modalities=("audio",), shows_text=False, audio_format=format)
        config = parse_pipeline_config({"stage_args": [AUDIO_STAGE]}, "test")
        media = MediaStream(events(), "r", "m", RequestContext(options=options), config, Transcripts())

        async def no_lines() -> AsyncGenerator[str, None]:
            async for _ in media.text():
                for nothing in ():
                    yield nothing

        return [json.loads(bytes(line)[6:]) async for line in media.answer(no_lines())]

    return asyncio.run(main())


@pytest.mark.parametrize("shape", [(), (2,), (1, 2)])
def test_streamed_audio_has_all_its_channels(shape: tuple[int, ...]) -> None:
    """Of a speech model, of two channels, and of the clips of a diffusion stage."""
    sound = torch.linspace(-0.5, 0.5, 600).reshape(*shape, -1)
    chunks = stream_audio(sound[..., :200], sound[..., :0], sound[..., 200:])
    audio = [chunk["choices"][0]["delta"].get("audio", {}) for chunk in chunks]
    data = b"".join(base64.b64decode(part.get("data", "")) for part in audio)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels()) == (RATE, 2 if shape else 1)
        samples = np.frombuffer(data[44:], "<i2").reshape(-1, file.getnchannels()).T / 32768
    np.testing.assert_allclose(samples, sound.reshape(samples.shape), atol=1 / 32768)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


AT: dict[str, Any] = {"request_id": "r", "sequence": 0, "ts": 0.0}
CONFIG: Any = SimpleNamespace(stage_args=[])


def segment(samples: torch.Tensor) -> ARSegmentEvent:
    return ARSegmentEvent(**AT, stage_id=1, final_output_type="audio", multimodal_output={"audio": samples})


def text_output(text: str = "", finish_reason: str | None = None) -> RequestOutput:
    output = CompletionOutput(0, text, [], None, None, finish_reason=finish_reason)
    return RequestOutput("r", None, [1], None, [output], finished=False, num_cached_tokens=5)


def spoken_end(samples: torch.Tensor | None = None, finish_reason: str = "stop") -> CompletedEvent:
    tensors = {} if samples is None else {"audio": samples}
    spoken = [Completion(finish_reason=finish_reason)]
    output = StageOutput(request_id="r", stage_id=1, completions=spoken, tensors=tensors)
    return CompletedEvent(**AT, outputs=[OmniRequestOutput("r", output, "audio", [])])


class Answer:
    """A chat answer of these outputs, read as deltas.

    Attributes:
        deltas: Those that were read.
        is_closed: Whether its request has ended.
    """

    def __init__(self, outputs: Iterable[Any], *last_lines: str) -> None:
        self.deltas: list[ChatDelta] = []
        self.is_closed = False
        self._outputs, self._last_lines = outputs, last_lines
        options = RequestOptions(modalities=("text", "audio"))
        made = PrefetchedStream(self._made())
        context = RequestContext(options=options, mm_token_counts={"audio": 7}, outputs=[made])
        self._stream = DeltaStream(made, context, CONFIG, Transcripts())

    async def read(self) -> None:
        async for delta in self.stream():
            self.deltas.append(delta)

    def stream(self) -> AsyncGenerator[ChatDelta, None]:
        return self._stream.answer(self._lines())

    async def _made(self) -> AsyncGenerator[Any, None]:
        try:
            for output in self._outputs:
                yield output
        finally:
            self.is_closed = True

    async def _lines(self) -> AsyncGenerator[str, None]:
        """As vLLM's handler writes them."""
        async for output in self._stream.text():
            (first,) = output.outputs
            delta = json.loads(first.text) if first.text.startswith("{") else {"content": first.text}
            yield line({"choices": [{"index": 0, "delta": delta, "finish_reason": first.finish_reason}]})
        for last in self._last_lines:
            yield last


def line(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def test_deltas_have_text_and_speech_in_the_order_of_the_pipeline() -> None:
    first, second = torch.ones(3), torch.zeros(2)
    call = {"index": 0, "id": "call"}
    used = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    outputs = [
        text_output("é"), segment(first), text_output(json.dumps({"tool_calls": [call]})), segment(torch.empty(0)),
        segment(second), text_output("", "stop"), spoken_end(finish_reason="length"),
    ]  # fmt: skip
    answer = Answer(outputs, line({"choices": [], "usage": used}), DONE.decode())
    asyncio.run(answer.read())
    assert answer.is_closed
    made = [(d.text, d.tool_calls, d.finish_reason) for d in answer.deltas if d.speech is None and not d.usage]
    assert made == [("é", (), None), ("", [call], None), ("", (), "stop"), ("", (), "length")]
    assert [d.speech is not None for d in answer.deltas] == [False, True, False, True, False, False, False]
    # A sample is not copied on its way to the reader.
    spoken = [d.speech for d in answer.deltas if d.speech is not None]
    assert np.shares_memory(spoken[0], first.numpy()) and np.shares_memory(spoken[1], second.numpy())
    assert answer.deltas[-1].usage is not None
    assert answer.deltas[-1].usage["completion_tokens_details"] == {
        "reasoning_tokens": 0, "audio_tokens": 0, "text_tokens": 2,
    }  # fmt: skip
    assert all(delta.mm_token_counts == {"audio": 7} for delta in answer.deltas)
    assert all(delta.num_cached_tokens == 5 for delta in answer.deltas)


def test_speech_that_is_made_at_once_is_one_delta() -> None:
    whole = torch.ones(4)
    answer = Answer([text_output("a", "stop"), spoken_end(whole)])
    asyncio.run(answer.read())
    assert [None if d.speech is None else d.speech.tolist() for d in answer.deltas] == [None, [1.0] * 4, None]

    answer = Answer([text_output("", "stop"), spoken_end()])  # A call is not spoken.
    asyncio.run(answer.read())
    assert all(delta.speech is None for delta in answer.deltas)


def test_a_failed_answer_ends_with_its_error() -> None:
    answer = Answer([text_output("a")], line(FAILED), DONE.decode())
    with pytest.raises(ErrorLine) as failure:
        asyncio.run(answer.read())
    assert failure.value.args == (FAILED,) and answer.is_closed and len(answer.deltas) == 1


def test_speech_that_is_not_numbers_is_no_delta() -> None:
    answer = Answer([text_output("a"), segment(torch.tensor([torch.nan]))])
    with pytest.raises(BrokenAudioError):  # vLLM's handler makes an error line of it.
        asyncio.run(answer.read())
    assert answer.is_closed and len(answer.deltas) == 1


def test_deltas_are_made_only_as_far_as_they_are_read() -> None:
    async def main() -> None:
        second = torch.zeros(24_000)
        numbers = iter(range(100))
        deltas = Answer(segment(second) for _ in numbers).stream()

        await anext(deltas)
        for _ in range(1000):  # Many more than it takes to make all of them.
            await asyncio.sleep(0)
        assert 97 - MAX_UNSENT_BYTES // second.nbytes <= numbers.__length_hint__() < 99
        assert len([delta async for delta in deltas]) == 99

    asyncio.run(main())


def test_an_answer_whose_reader_has_gone_is_closed() -> None:
    """At once, while vLLM's handler has a line that is not taken: the handler does not close what it reads."""

    async def main() -> None:
        answer = Answer(text_output("x" * 100_000) for _ in range(100))
        deltas = answer.stream()
        await anext(deltas)
        for _ in range(1000):  # Until no more fits.
            await asyncio.sleep(0)
        assert not answer.is_closed
        await deltas.aclose()
        assert answer.is_closed

    asyncio.run(main())
