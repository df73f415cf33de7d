# SPDX-License-Identifier: Apache-2.0
"""A streamed chat answer of several modalities: vLLM's lines of text, and between them ours with everything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
from vllm.outputs import RequestOutput

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.openai.audio_formats import DEFAULT_SAMPLE_RATE, AudioEncoder
from vllm_omni.entrypoints.openai.chat_media import add_media_usage, encode_speech, joint_finish_reason, picture_fields
from vllm_omni.entrypoints.openai.chat_options import ChatOptions
from vllm_omni.entrypoints.openai.engine_client import EngineOutput
from vllm_omni.entrypoints.openai.transcripts import Transcripts, new_audio_id
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent
from vllm_omni.outputs import OmniRequestOutput

Line: TypeAlias = str | bytes


class MediaStream:
    """One answer. Its text goes through vLLM's handler, everything else directly into the lines of choice 0.

    vLLM ends choice 0 with its text. Here it ends with the last of its outputs, so that the finish reason is held back
    until then.
    """

    def __init__(
        self,
        outputs: AsyncIterator[EngineOutput],
        options: ChatOptions,
        config: PipelineConfig,
        request_id: str,
        model_name: str,
        mm_token_counts: dict[str, int] | None,
        transcripts: Transcripts,
    ) -> None:
        self._outputs = outputs
        self._options = options
        self._config = config
        self._chunk = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model_name,
        }
        self._audio_id = new_audio_id()
        self._transcript: list[str] = []
        self._transcripts = transcripts
        self._speaks = "audio" in options.for_engine.modalities
        self._mm_token_counts = mm_token_counts
        self._lines: asyncio.Queue[Line | None] = asyncio.Queue()
        self._encoders: dict[int, AudioEncoder] = {}
        # Clients join deltas, so role and id are sent once. vLLM's first line has the role.
        self._has_role = options.shows_text
        self._has_audio_id = False
        self._end: dict[str, Any] = {"finish_reason": None}
        self._completed: CompletedEvent | None = None

    async def text(self) -> AsyncGenerator[RequestOutput, None]:
        """What vLLM's handler reads; ends when all outputs are complete."""
        async for output in self._outputs:
            if isinstance(output, RequestOutput):
                self._put_transcript(output)
                yield output
            else:
                await self._put_event(output)

    async def lines(self, text: AsyncGenerator[str, None]) -> AsyncGenerator[Line, None]:
        """The answer; `text` are the lines that vLLM's handler makes of `text()`."""
        pump = asyncio.create_task(self._pump(text))
        try:
            while (line := await self._lines.get()) is not None:
                yield line
            await pump
        finally:
            pump.cancel()
            with suppress(asyncio.CancelledError):
                await pump

    async def _pump(self, text: AsyncGenerator[str, None]) -> None:
        try:
            async for line in text:
                rewritten = self._rewrite(line)
                if rewritten is not None:
                    self._lines.put_nowait(rewritten)
        finally:
            self._lines.put_nowait(None)

    def _rewrite(self, line: str) -> Line | None:
        """vLLM's line, without the end of choice 0, and with the tokens of the other outputs in the usage.

        None: the line has text that the request does not include.
        """
        if line.startswith(("data: [DONE]", 'data: {"error"')):
            return line
        if '"choices":[]' in line:
            chunk = _read(line)
            if self._completed is not None:
                add_media_usage(chunk["usage"], self._completed, self._config, self._mm_token_counts)
            return _line(chunk)
        if '"finish_reason":null' not in line:
            chunk = _read(line)
            (choice,) = chunk["choices"]
            if choice["index"] == 0:
                self._end = {name: choice.pop(name) for name in ("finish_reason", "stop_reason") if name in choice}
                line = _line({**chunk, "choices": [{**choice, "finish_reason": None}]}).decode()
        return line if self._options.shows_text else None

    def _put_transcript(self, output: RequestOutput) -> None:
        completion = output.outputs[0]
        if self._speaks and completion.index == 0 and completion.text:
            self._transcript.append(completion.text)
            self._put_audio(transcript=completion.text)

    async def _put_event(self, event: OmniEvent) -> None:
        if isinstance(event, CompletedEvent):
            await self._finish(event)
        elif isinstance(event, ARSegmentEvent) and event.final_output_type == "audio":
            samples = event.multimodal_output.get("audio")
            if samples is not None and samples.ndim == 1 and len(samples):
                self._put_data(await self._encoder(event.stage_id).encode_async(samples.numpy()))

    async def _finish(self, event: CompletedEvent) -> None:
        self._completed = event
        media = [output for output in event.outputs if output.final_output_type != "text"]
        for output in media:
            if output.final_output_type == "audio":
                await self._finish_audio(output)
            else:
                self._put(await asyncio.to_thread(picture_fields, output))
        self._put({}, **self._end | {"finish_reason": joint_finish_reason(self._end["finish_reason"], media)})

    async def _finish_audio(self, output: OmniRequestOutput) -> None:
        encoder = self._encoders.get(output.stage_id)
        if encoder is not None:
            self._put_data(await encoder.finish_async())
        else:
            self._put_audio(data=await asyncio.to_thread(encode_speech, output, self._options.audio_format))
        self._put_audio(expires_at=self._transcripts.keep(self._audio_id, "".join(self._transcript)))

    def _put_data(self, data: bytes) -> None:
        if data:
            self._put_audio(data=data)

    def _put_audio(self, **fields: Any) -> None:
        if not self._has_audio_id:
            self._has_audio_id = True
            fields = {"id": self._audio_id, **fields}
        self._put({"audio": fields})

    def _put(self, delta: dict[str, Any], **end: Any) -> None:
        if not self._has_role:
            self._has_role = True
            delta = {"role": "assistant", **delta}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **end}
        self._lines.put_nowait(_line({**self._chunk, "choices": [choice]}))

    def _encoder(self, stage_id: int) -> AudioEncoder:
        if stage_id not in self._encoders:
            sample_rate = self._config.stages[stage_id].sample_rate or DEFAULT_SAMPLE_RATE
            self._encoders[stage_id] = AudioEncoder(self._options.audio_format, sample_rate)
        return self._encoders[stage_id]


def _read(line: str) -> dict[str, Any]:
    return msgspec.json.decode(line.removeprefix("data: "))


def _line(chunk: dict[str, Any]) -> bytes:
    """msgspec writes bytes as base64."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
