# SPDX-License-Identifier: Apache-2.0
"""A chat answer as a stream: lines for a client of the chat, typed deltas for realtime responses and transcripts.

vLLM's handler writes the text; here all other outputs come between it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from vllm.outputs import RequestOutput

from vllm_omni.entrypoints.openai.audio_formats import (
    DEFAULT_SAMPLE_RATE,
    AudioEncoder,
    check_samples,
    count_channels,
    first_clip,
)
from vllm_omni.entrypoints.openai.chat_media import ChatMedia, has_unspoken, joint_finish_reason, outputs_besides_text
from vllm_omni.entrypoints.openai.engine_client import EngineOutput
from vllm_omni.entrypoints.openai.media_output import encode_speech, message_fields
from vllm_omni.entrypoints.openai.sse import Data, Line, read_chunk, read_line, sse_line
from vllm_omni.events import ARSegmentEvent, CompletedEvent
from vllm_omni.outputs import OmniRequestOutput

MAX_UNSENT_BYTES = 1 << 20

Item = TypeVar("Item")


class _ChatStream(ChatMedia, Generic[Item]):
    """One streamed answer: vLLM's handler makes lines of its text, and other outputs come between them, in the order of
    the pipeline. A derived class makes the reader's items of both, and puts them into the queue.
    """

    def __init__(
        self, outputs: AsyncGenerator[EngineOutput, None], num_bytes_of: Callable[[Item], int], *args: Any
    ) -> None:
        """
        Args:
            num_bytes_of: Of an item that the reader has not taken.
            args: Those of `ChatMedia`.
        """
        super().__init__(*args)
        self._outputs = outputs
        self._unread: UnsentQueue[Item] = UnsentQueue(num_bytes_of)
        self._completed: CompletedEvent | None = None

    async def text(self) -> AsyncGenerator[RequestOutput, None]:
        """The outputs for vLLM's handler; ends when all outputs are complete."""
        async with aclosing(self._outputs):  # It may end while it waits for the client.
            async for output in self._outputs:
                if isinstance(output, RequestOutput):
                    if output.num_cached_tokens is not None:  # Only the first output has it.
                        self._context.num_cached_tokens = output.num_cached_tokens
                    yield output
                elif isinstance(output, CompletedEvent):
                    self._completed = output
                    await self._put_end(outputs_besides_text(output))
                elif isinstance(output, ARSegmentEvent) and output.final_output_type == "audio":
                    samples = _speech_of(output)
                    if samples.size:
                        await self._put_speech(output.stage_id, samples)
                elif isinstance(output, ARSegmentEvent) and output.final_output_type == "text" and output.text:
                    await self._put_text(output.text)

    async def answer(self, text: AsyncGenerator[str, None]) -> AsyncGenerator[Item, None]:
        """The items of the answer; `text` are the lines that vLLM's handler makes of `text()`.

        Closing it ends its request to the engine.
        """
        pump = asyncio.create_task(self._pump(text))
        try:
            while (item := await self._unread.get()) is not None:
                yield item
            await pump
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            await self._context.abort()  # vLLM does not close the outputs that it reads.

    async def _pump(self, text: AsyncGenerator[str, None]) -> None:
        try:
            async for line in text:
                await self._put_line(line)
        finally:
            self._unread.close()

    async def _put_line(self, line: str) -> None:
        raise NotImplementedError

    async def _put_speech(self, stage_id: int, samples: np.ndarray) -> None:
        raise NotImplementedError

    async def _put_text(self, text: str) -> None:
        """Text that vLLM's handler does not write."""

    async def _put_end(self, media: list[OmniRequestOutput]) -> None:
        """What ends the answer; `media` are its outputs besides the text."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ChatDelta:
    """What is added to an answer with one choice.

    Attributes:
        text: Of the content.
        tool_calls: Deltas of calls, as OpenAI's.
        speech: float32 `[samples]` or `[channels, samples]`; None: none.
        finish_reason: Of the text, and at the end of the whole.
        usage: So far, as OpenAI's, if it is known.
        mm_token_counts, num_cached_tokens: See `RequestContext`.
    """

    text: str = ""
    tool_calls: Sequence[Data] = ()
    speech: np.ndarray | None = None
    finish_reason: str | None = None
    usage: Data | None = None
    mm_token_counts: Mapping[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        num_bytes = 0 if self.speech is None else self.speech.nbytes
        return num_bytes + len(self.text) + sum(len(str(call)) for call in self.tool_calls)


class DeltaStream(_ChatStream[ChatDelta]):
    """One streamed answer as typed deltas. Ends with `ErrorLine` if it failed."""

    def __init__(self, outputs: AsyncGenerator[EngineOutput, None], *args: Any) -> None:
        """The further arguments are those of `ChatMedia`."""
        super().__init__(outputs, lambda delta: delta.num_bytes, *args)
        self._speaking: set[int] = set()  # Stages whose speech came in segments.
        self._finish_reason: str | None = None

    async def _put_line(self, line: str) -> None:
        if (chunk := read_chunk(line)) is None:
            return
        fields = text_fields(chunk)
        if self._completed is not None and fields["usage"]:
            self._add_usage(fields["usage"], self._completed)
        self._finish_reason = fields["finish_reason"] or self._finish_reason
        await self._put(**fields)

    async def _put_speech(self, stage_id: int, samples: np.ndarray) -> None:
        check_samples(samples)
        self._speaking.add(stage_id)
        await self._put(speech=samples)

    async def _put_end(self, media: list[OmniRequestOutput]) -> None:
        for output in media:
            is_whole = output.final_output_type == "audio" and output.stage_id not in self._speaking
            if is_whole and (samples := _speech_of(output)).size:
                await self._put_speech(output.stage_id, samples)
        await self._put(finish_reason=joint_finish_reason(self._finish_reason, media))

    async def _put(self, **fields: Any) -> None:
        counts, num_cached = self._context.mm_token_counts, self._context.num_cached_tokens
        await self._unread.put(ChatDelta(mm_token_counts=counts, num_cached_tokens=num_cached, **fields))


def _speech_of(output: ARSegmentEvent | OmniRequestOutput) -> np.ndarray:
    return first_clip(output.multimodal_output.get("audio", torch.empty(0)))


def text_fields(chunk: Data) -> dict[str, Any]:
    """The fields of a `ChatDelta` that a chunk of vLLM's has, of a chat or of a transcription."""
    (choice,) = chunk["choices"] or [{}]
    delta = choice.get("delta", {})
    return {
        "text": delta.get("content") or "",
        "tool_calls": delta.get("tool_calls") or (),
        "finish_reason": choice.get("finish_reason"),
        "usage": chunk.get("usage"),
    }


class MediaStream(_ChatStream[Line]):
    """One streamed answer as lines: those of vLLM's handler, and between them those of all other outputs, in choice 0.

    vLLM ends choice 0 with its text. Here it ends with the last of its outputs, so the finish reason is held until
    then.
    """

    def __init__(
        self,
        outputs: AsyncGenerator[EngineOutput, None],
        request_id: str,
        model_name: str,
        *args: Any,
        has_handler: bool = True,
    ) -> None:
        """
        Args:
            args: Those of `ChatMedia`.
            has_handler: vLLM's handler writes the text. Otherwise it is read of the events.
        """
        super().__init__(outputs, len, *args)
        self._chunk = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model_name,
        }
        self._transcript: list[str] = []
        self._blank = ""  # White space, which is part of the transcript if text follows.
        self._has_unspoken = False
        self._speaks = "audio" in self._options.modalities
        self._encoders: dict[int, AudioEncoder] = {}
        # Clients join deltas, so role and id are sent once. vLLM's first line has the role.
        self._has_handler = has_handler
        self._has_role = has_handler and self._options.shows_text
        self._has_audio_id = False
        self._end: dict[str, Any] = {"finish_reason": None}

    async def _put_line(self, line: str) -> None:
        rewritten = await self._rewrite(line)
        if rewritten is not None:
            await self._unread.put(rewritten)

    async def _rewrite(self, line: str) -> Line | None:
        """vLLM's line, without the end of choice 0, and with the tokens of the other outputs in the usage.

        None: the line has text that the request does not include.
        """
        if line.startswith(("data: [DONE]", 'data: {"error"')):
            return line
        if '"choices":[]' in line:
            chunk = read_line(line)
            if self._completed is not None:
                self._add_usage(chunk["usage"], self._completed)
            return sse_line(chunk)
        if self._speaks or '"finish_reason":null' not in line:
            chunk = read_line(line)
            (choice,) = chunk["choices"]
            if choice["index"] == 0 and self._speaks:
                await self._take_delta(choice["delta"])
            if choice["index"] == 0 and choice["finish_reason"] is not None:
                self._end = {name: choice.pop(name) for name in ("finish_reason", "stop_reason") if name in choice}
                shown = {**choice, "finish_reason": None}
                return sse_line({**chunk, "choices": [shown]}) if self._options.shows_text else None
        return line if self._options.shows_text else None

    async def _take_delta(self, delta: dict[str, Any]) -> None:
        """The text of the first sequence: its content is spoken, and its tool calls are part of every answer."""
        self._has_unspoken |= has_unspoken(delta)
        self._blank += delta.get("content") or ""
        if self._blank.strip():
            await self._put_transcript()
        if delta.get("tool_calls") and not self._options.shows_text:
            await self._put({"tool_calls": delta["tool_calls"]})

    async def _put_transcript(self) -> None:
        text, self._blank = self._blank, ""
        if text:
            self._transcript.append(text)
            await self._put_audio(transcript=text)

    async def _put_text(self, text: str) -> None:
        if self._has_handler:  # The text is another stage's.
            return
        if self._speaks:
            await self._take_delta({"content": text})
        if self._options.shows_text:
            await self._put({"content": text})

    async def _put_speech(self, stage_id: int, samples: np.ndarray) -> None:
        encoder = self._encoder(stage_id, count_channels(samples))
        await self._put_data(await encoder.encode_async(samples))

    async def _put_end(self, media: list[OmniRequestOutput]) -> None:
        for output in media:
            if output.final_output_type == "audio":
                await self._finish_audio(output)
            else:
                await self._put(await asyncio.to_thread(message_fields, output))
        await self._put({}, **self._end | {"finish_reason": joint_finish_reason(self._end["finish_reason"], media)})

    async def _finish_audio(self, output: OmniRequestOutput) -> None:
        if self._has_unspoken and not self._transcript:
            return
        await self._put_transcript()
        encoder = self._encoders.get(output.stage_id)
        if encoder is not None:
            await self._put_data(await encoder.finish_async())
        else:
            await self._put_audio(data=await asyncio.to_thread(encode_speech, output, self._options.audio_format))
        await self._put_audio(expires_at=self._keep("".join(self._transcript)))

    async def _put_data(self, data: bytes) -> None:
        if data:
            await self._put_audio(data=data)

    async def _put_audio(self, **fields: Any) -> None:
        if not self._has_audio_id:
            self._has_audio_id = True
            fields = {"id": self._audio_id, **fields}
        await self._put({"audio": fields})

    async def _put(self, delta: dict[str, Any], **end: Any) -> None:
        if not self._has_role:
            self._has_role = True
            delta = {"role": "assistant", **delta}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **end}
        await self._unread.put(sse_line({**self._chunk, "choices": [choice]}))

    def _encoder(self, stage_id: int, num_channels: int) -> AudioEncoder:
        if stage_id not in self._encoders:
            sample_rate = self._config.stages[stage_id].sample_rate or DEFAULT_SAMPLE_RATE
            self._encoders[stage_id] = AudioEncoder(self._options.audio_format, sample_rate, num_channels=num_channels)
        return self._encoders[stage_id]


class UnsentQueue(asyncio.Queue[Item | None], Generic[Item]):
    """What has not been sent; has room below `MAX_UNSENT_BYTES`. A slow client makes its request wait."""

    def __init__(self, num_bytes_of: Callable[[Item], int]) -> None:
        super().__init__()
        self._num_bytes_of = num_bytes_of
        self._num_bytes = 0
        self._is_closed = False

    def full(self) -> bool:
        return self._num_bytes >= MAX_UNSENT_BYTES and not self._is_closed

    def close(self) -> None:
        """The reader gets None after the last item."""
        self._is_closed = True
        self.put_nowait(None)

    def clear(self) -> None:
        """Drops the items."""
        while not self.empty():
            self.get_nowait()

    def _put(self, item: Item | None) -> None:
        self._num_bytes += 0 if item is None else self._num_bytes_of(item)
        super()._put(item)

    def _get(self) -> Item | None:
        item = super()._get()
        self._num_bytes -= 0 if item is None else self._num_bytes_of(item)
        return item
