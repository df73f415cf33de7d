# SPDX-License-Identifier: Apache-2.0
"""The outputs of a chat answer that are not text: in its message and in its usage."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.utils import random_uuid

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.openai.media_output import encode_speech, finish_reason_of, message_fields
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.events import CompletedEvent
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.stage.spoken_reply import read_spoken
from vllm_omni.vllm_protocol import ChatCompletionResponse

LIFETIME_S = 3600
MAX_TRANSCRIPT_BYTES = 16 << 20
"""Of each API key, as Python holds them."""


class Transcripts:
    """Texts of earlier speech, for later turns that name it by `audio.id`, as in OpenAI's API.

    Those of the last hour, at most `MAX_TRANSCRIPT_BYTES` of each API key, for requests with that key. Ids are random:
    without keys one client cannot guess another's. For the event loop.
    """

    def __init__(self) -> None:
        # By owner. id: (expiry in `time.monotonic()` seconds, text), in order of expiry
        self._kept: defaultdict[bytes, OrderedDict[str, tuple[float, str]]] = defaultdict(OrderedDict)
        self._num_bytes: Counter[bytes] = Counter()

    def keep(self, audio_id: str, transcript: str, owner: bytes) -> int:
        """Keeps a transcript; returns when it expires, in seconds since 1970. For the owner see `RequestContext`."""
        now = time.monotonic()
        kept = self._kept[owner]
        kept[audio_id] = (now + LIFETIME_S, transcript)
        self._num_bytes[owner] += sys.getsizeof(transcript)
        while kept and (self._num_bytes[owner] > MAX_TRANSCRIPT_BYTES or next(iter(kept.values()))[0] <= now):
            _, (_, oldest) = kept.popitem(last=False)
            self._num_bytes[owner] -= sys.getsizeof(oldest)
        return int(time.time() + LIFETIME_S)

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
        if expiry > time.monotonic():
            transcript = kept_transcript
        if not isinstance(transcript, str):
            raise VLLMValidationError(
                f"there is no audio {audio_id!r}, or it has expired; send its transcript, as audio.transcript or as "
                "content",
                parameter=f"messages[{index}].audio.id",
            )
        return {**{key: value for key, value in message.items() if key != "audio"}, "content": transcript}


def outputs_besides_text(event: CompletedEvent) -> list[OmniRequestOutput]:
    """Those that come beside the text of a choice, in stage order."""
    return [output for output in event.outputs if output.final_output_type != "text"]


def joint_finish_reason(text_reason: str | None, media: Iterable[OmniRequestOutput]) -> str:
    """Why a choice ended: the text's reason, but `length` if the text is complete and its speech was cut."""
    is_cut = any(finish_reason_of(output) == "length" for output in media)
    return "length" if is_cut and text_reason in (None, "stop") else text_reason or "stop"


def has_unspoken(message: dict[str, Any]) -> bool:
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
        media = outputs_besides_text(event)
        choice = answer.choices[0]
        fields = choice.message.model_dump()
        content = fields.get("content") or ""
        transcript = await self._read_transcript(event, content)
        is_silent = not transcript.strip() and (bool(content) or has_unspoken(fields))
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
        choice.finish_reason = joint_finish_reason(choice.finish_reason, media)
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
