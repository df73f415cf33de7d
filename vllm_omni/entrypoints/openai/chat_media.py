# SPDX-License-Identifier: Apache-2.0
"""The outputs of a chat answer that are not text: in its message, in its usage, and in a stream between the text."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

import torch
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.utils import random_uuid

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.openai.audio_formats import DEFAULT_SAMPLE_RATE, AudioEncoder, count_channels, first_clip
from vllm_omni.entrypoints.openai.engine_client import EngineOutput
from vllm_omni.entrypoints.openai.media_output import encode_speech, finish_reason_of, message_fields
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.sse import Line, read_line, sse_line
from vllm_omni.events import ARSegmentEvent, CompletedEvent, OmniEvent
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.stage.spoken_reply import read_spoken
from vllm_omni.vllm_protocol import ChatCompletionResponse

MAX_UNSENT_BYTES = 1 << 20

Item = TypeVar("Item")

LIFETIME_S = 3600
MAX_TRANSCRIPT_BYTES = 16 << 20
"""Of each API key, as Python holds them."""


class Transcripts:
    """Texts of earlier speech, for later turns that name it by `audio.id`, as in OpenAI's API.

    Those of the last hour, at most `MAX_TRANSCRIPT_BYTES` of each API key, for requests with that key. Ids are random:
    without keys one client cannot guess another's. For the event loop.
    """

    def __init__(self) -> None:
        # By owner. id: (expiry, text), in order of expiry
        self._kept: defaultdict[bytes, OrderedDict[str, tuple[float, str]]] = defaultdict(OrderedDict)
        self._num_bytes: Counter[bytes] = Counter()

    def keep(self, audio_id: str, transcript: str, owner: bytes) -> int:
        """Keeps a transcript; returns when it expires, in seconds since 1970. For the owner see `RequestContext`."""
        now = time.time()
        kept = self._kept[owner]
        kept[audio_id] = (now + LIFETIME_S, transcript)
        self._num_bytes[owner] += sys.getsizeof(transcript)
        while kept and (self._num_bytes[owner] > MAX_TRANSCRIPT_BYTES or next(iter(kept.values()))[0] <= now):
            _, (_, oldest) = kept.popitem(last=False)
            self._num_bytes[owner] -= sys.getsizeof(oldest)
        return int(now + LIFETIME_S)

    def fill_in(self, messages: Sequence[Any], owner: bytes) -> list[Any]:
        """The messages of a request, with the text of those that have only an `audio`.

        Raises:
            VLLMValidationError: The owner has no audio with its id, or it has expired, and it has no transcript.
        """
        return [self._with_text(message, i, owner) for i, message in enumerate(messages)]

    def _with_text(self, message: Any, index: int, owner: bytes) -> Any:
        audio = message.get("audio") if isinstance(message, dict) else None
        if audio is None or message.get("content"):
            return message
        own = audio if isinstance(audio, dict) else {}
        audio_id, transcript = own.get("id"), own.get("transcript")
        expiry, kept_transcript = 0.0, ""
        if owner in self._kept and isinstance(audio_id, str):
            expiry, kept_transcript = self._kept[owner].get(audio_id, (0.0, ""))
        if expiry > time.time():
            transcript = kept_transcript
        if not isinstance(transcript, str):
            raise VLLMValidationError(
                f"there is no audio {audio_id!r}, or it has expired; send its transcript, as audio.transcript or as "
                "content",
                parameter=f"messages[{index}].audio.id",
            )
        return {**{key: value for key, value in message.items() if key != "audio"}, "content": transcript}


async def split_outputs(
    outputs: AsyncIterator[EngineOutput], completed: list[CompletedEvent]
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of text; the last event goes to `completed`."""
    async for output in outputs:
        if isinstance(output, RequestOutput):
            yield output
        elif isinstance(output, CompletedEvent):
            completed.append(output)


def _joint_finish_reason(text_reason: str | None, media: Iterable[OmniRequestOutput]) -> str:
    """Why a choice ended: the text's reason, but `length` if the text is complete and its speech was cut."""
    is_cut = any(finish_reason_of(output) == "length" for output in media)
    return "length" if is_cut and text_reason in (None, "stop") else text_reason or "stop"


def _has_unspoken(message: dict[str, Any]) -> bool:
    """Whether a message, or a delta of one, has text that is not content."""
    return bool(message.get("tool_calls") or message.get("reasoning"))


class ChatMedia:
    """Adds the outputs that are not text to one answer, in the first choice."""

    def __init__(self, context: RequestContext, config: PipelineConfig, transcripts: Transcripts) -> None:
        """
        Args:
            transcripts: Keeps the text of the speech, for later turns.
        """
        self._context, self._options = context, context.options
        self._config = config
        self._transcripts = transcripts
        self._audio_id = f"audio-{random_uuid()}"

    async def add(self, answer: ChatCompletionResponse, event: CompletedEvent) -> None:
        """Adds them to a whole answer. If it does not show its text there is one choice, whose content is null."""
        media = [output for output in event.outputs if output.final_output_type != "text"]
        choice = answer.choices[0]
        fields = choice.message.model_dump()
        content = fields.get("content") or ""
        transcript = await self._read_transcript(event, content)
        is_silent = not transcript.strip() and (bool(content) or _has_unspoken(fields))
        if not self._options.shows_text:
            fields = {name: fields[name] for name in ("role", "tool_calls") if fields.get(name)}
            choice.logprobs = None
            del answer.choices[1:]
        for output in media:
            if output.final_output_type == "audio":
                if is_silent:
                    continue
                fields["audio"] = {
                    "id": self._audio_id,
                    "data": await asyncio.to_thread(encode_speech, output, self._options.audio_format),
                    "transcript": transcript,
                    "expires_at": self._keep(transcript),
                }
            else:
                fields |= await asyncio.to_thread(message_fields, output)
        choice.message = type(choice.message)(**fields)
        choice.finish_reason = _joint_finish_reason(choice.finish_reason, media)
        usage = answer.usage.model_dump()
        self._add_usage(usage, event)
        answer.usage = type(answer.usage)(**usage)

    def _keep(self, transcript: str) -> int:
        return self._transcripts.keep(self._audio_id, transcript, self._context.owner)

    async def _read_transcript(self, event: CompletedEvent, content: str) -> str:
        """The content; of a reply that is cut in a tool call, which vLLM then calls content, what comes before it."""
        spoken = self._context.spoken_text
        text = next((output for output in event.outputs if output.final_output_type == "text"), None)
        if spoken is None or text is None or isinstance(text.outputs[0].stop_reason, str):
            return content
        first, is_stopped = text.outputs[0], text.outputs[0].finish_reason == "stop"
        return await asyncio.to_thread(
            read_spoken, spoken, list(text.prompt_token_ids or ()), list(first.token_ids), is_stopped
        )

    def _add_usage(self, usage: dict[str, Any], event: CompletedEvent) -> None:
        """Adds the tokens of speech to a usage, and which tokens of the prompt were audio."""
        # Speech is written by the stages between the text and the audio.
        speaking = [
            stage.stage_id
            for stage in self._config.stage_args
            if stage.kind.is_autoregressive and not stage.final_output and not stage.is_comprehension
        ]
        metrics = event.outputs[0].stage_metrics
        audio_tokens = sum(stage.num_output_tokens for stage in metrics if stage.stage_id in speaking)
        text_tokens = usage["completion_tokens"] or 0
        usage["completion_tokens"] = text_tokens + audio_tokens
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        details = {"reasoning_tokens": 0} | (usage.get("completion_tokens_details") or {})
        usage["completion_tokens_details"] = {**details, "audio_tokens": audio_tokens, "text_tokens": text_tokens}
        if prompt_audio_tokens := self._context.mm_token_counts.get("audio"):
            prompt_details = usage.get("prompt_tokens_details") or {}
            usage["prompt_tokens_details"] = {**prompt_details, "audio_tokens": prompt_audio_tokens}


class MediaStream(ChatMedia):
    """One streamed answer: vLLM's handler makes the lines of text, this class those of all other outputs, in choice 0.

    vLLM ends choice 0 with its text. Here it ends with the last of its outputs, so the finish reason is held until
    then.
    """

    def __init__(
        self, outputs: AsyncGenerator[EngineOutput, None], request_id: str, model_name: str, *args: Any
    ) -> None:
        """The further arguments are those of `ChatMedia`."""
        super().__init__(*args)
        self._outputs = outputs
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
        self._lines: UnsentQueue[Line] = UnsentQueue(len)
        self._encoders: dict[int, AudioEncoder] = {}
        # Clients join deltas, so role and id are sent once. vLLM's first line has the role.
        self._has_role = self._options.shows_text
        self._has_audio_id = False
        self._end: dict[str, Any] = {"finish_reason": None}
        self._completed: CompletedEvent | None = None

    async def text(self) -> AsyncGenerator[RequestOutput, None]:
        """The outputs for vLLM's handler; ends when all outputs are complete."""
        async with aclosing(self._outputs):  # It may end while it waits for the client.
            async for output in self._outputs:
                if isinstance(output, RequestOutput):
                    if output.num_cached_tokens is not None:  # Only the first output has it.
                        self._context.num_cached_tokens = output.num_cached_tokens
                    yield output
                else:
                    await self._put_event(output)

    async def lines(self, text: AsyncGenerator[str, None]) -> AsyncGenerator[Line, None]:
        """The lines of the answer; `text` are those that vLLM's handler makes of `text()`."""
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
                rewritten = await self._rewrite(line)
                if rewritten is not None:
                    await self._lines.put(rewritten)
        finally:
            self._lines.close()

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
                shown = self._end if self._context.shows_text_end else {"finish_reason": None}
                return sse_line({**chunk, "choices": [{**choice, **shown}]}) if self._options.shows_text else None
        return line if self._options.shows_text else None

    async def _take_delta(self, delta: dict[str, Any]) -> None:
        """The text of the first sequence: its content is spoken, and its tool calls are part of every answer."""
        self._has_unspoken |= _has_unspoken(delta)
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

    async def _put_event(self, event: OmniEvent) -> None:
        if isinstance(event, CompletedEvent):
            await self._finish(event)
        elif isinstance(event, ARSegmentEvent) and event.final_output_type == "audio":
            samples = first_clip(event.multimodal_output.get("audio", torch.empty(0)))
            if samples.size:
                encoder = self._encoder(event.stage_id, count_channels(samples))
                await self._put_data(await encoder.encode_async(samples))

    async def _finish(self, event: CompletedEvent) -> None:
        self._completed = event
        media = [output for output in event.outputs if output.final_output_type != "text"]
        for output in media:
            if output.final_output_type == "audio":
                await self._finish_audio(output)
            else:
                await self._put(await asyncio.to_thread(message_fields, output))
        await self._put({}, **self._end | {"finish_reason": _joint_finish_reason(self._end["finish_reason"], media)})

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
        await self._lines.put(sse_line({**self._chunk, "choices": [choice]}))

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

    def _put(self, item: Item | None) -> None:
        self._num_bytes += 0 if item is None else self._num_bytes_of(item)
        super()._put(item)

    def _get(self) -> Item | None:
        item = super()._get()
        self._num_bytes -= 0 if item is None else self._num_bytes_of(item)
        return item
