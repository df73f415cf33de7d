# SPDX-License-Identifier: Apache-2.0
"""A streamed chat answer of several modalities: vLLM's lines of text, and between them ours of everything else."""

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
from vllm_omni.entrypoints.openai.chat_options import ChatOptions
from vllm_omni.entrypoints.openai.engine_client import EngineOutput
from vllm_omni.entrypoints.openai.media_choices import add_media_usage, content_of, finish_reason_of
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent

Line: TypeAlias = str | bytes


class MediaStream:
    """One answer. Its text goes through vLLM's handler, everything else directly into the answer's lines."""

    def __init__(
        self,
        outputs: AsyncIterator[EngineOutput],
        options: ChatOptions,
        config: PipelineConfig,
        request_id: str,
        model_name: str,
        num_text_choices: int,
        mm_token_counts: dict[str, int] | None,
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
        self._audio_id = f"audio-{request_id}"
        media = config.final_stages([m for m in options.for_engine.modalities if m != "text"])
        first = num_text_choices if options.shows_text else 0
        self._indexes = {stage_id: first + i for i, stage_id in enumerate(media)}
        self._mm_token_counts = mm_token_counts
        self._lines: asyncio.Queue[Line | None] = asyncio.Queue()
        self._encoders: dict[int, AudioEncoder] = {}
        self._begun: set[int] = set()
        self._completed: CompletedEvent | None = None

    async def text(self) -> AsyncGenerator[RequestOutput, None]:
        """What vLLM's handler reads; ends when all outputs are complete."""
        async for output in self._outputs:
            if isinstance(output, RequestOutput):
                if not self._options.shows_text:
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
        """A line of vLLM's: usage gets the other outputs' tokens, text is left out where it was not asked for."""
        if line.startswith("data: [DONE]") or line.startswith('data: {"error"'):
            return line
        if '"choices":[]' in line and self._completed is not None:
            chunk = msgspec.json.decode(line.removeprefix("data: "))
            add_media_usage(chunk["usage"], self._completed, self._config, self._mm_token_counts)
            return _line(chunk)
        if not self._options.shows_text:
            return None
        return line.replace("data: {", 'data: {"modality":"text",', 1)

    def _put_transcript(self, output: RequestOutput) -> None:
        completion = output.outputs[0]
        if completion.index == 0 and completion.text:
            for stage_id in self._indexes:
                if self._config.stages[stage_id].final_output_type == "audio":
                    self._put(stage_id, {"audio": {"transcript": completion.text}})

    async def _put_event(self, event: OmniEvent) -> None:
        if isinstance(event, CompletedEvent):
            await self._finish(event)
        elif isinstance(event, ARSegmentEvent) and event.final_output_type == "audio":
            samples = event.multimodal_output.get("audio")
            if samples is not None and samples.ndim == 1 and len(samples):
                await self._put_audio(event.stage_id, await self._encoder(event.stage_id).encode_async(samples.numpy()))

    async def _finish(self, event: CompletedEvent) -> None:
        self._completed = event
        for output in event.outputs:
            if output.final_output_type == "text":
                continue
            encoder = self._encoders.get(output.stage_id)
            if encoder is not None:
                await self._put_audio(output.stage_id, await encoder.finish_async())
                delta: dict[str, Any] = {"audio": {"expires_at": self._chunk["created"]}}
            else:
                delta = await content_of(output, self._options.audio_format, self._audio_id)
            self._put(output.stage_id, delta, finish_reason_of(output))

    async def _put_audio(self, stage_id: int, data: bytes) -> None:
        if data:
            self._put(stage_id, {"audio": {"data": data}})

    def _put(self, stage_id: int, delta: dict[str, Any], finish_reason: str | None = None) -> None:
        modality = self._config.stages[stage_id].final_output_type
        index = self._indexes[stage_id]
        if index not in self._begun:  # Clients join deltas, so that role and id are said once.
            self._begun.add(index)
            delta = {"role": "assistant", **delta}
            if modality == "audio":
                delta["audio"] = {"id": self._audio_id, **delta["audio"]}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        self._lines.put_nowait(_line({"modality": modality, **self._chunk, "choices": [choice]}))

    def _encoder(self, stage_id: int) -> AudioEncoder:
        if stage_id not in self._encoders:
            sample_rate = self._config.stages[stage_id].sample_rate or DEFAULT_SAMPLE_RATE
            self._encoders[stage_id] = AudioEncoder(self._options.audio_format, sample_rate)
        return self._encoders[stage_id]


def _line(chunk: dict[str, Any]) -> bytes:
    """msgspec writes bytes as base64."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
