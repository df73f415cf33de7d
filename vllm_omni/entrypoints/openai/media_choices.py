# SPDX-License-Identifier: Apache-2.0
"""What a pipeline made besides text, as choices of a chat answer, and in its count of tokens."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse, ChatCompletionResponseChoice

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.openai.audio_formats import DEFAULT_SAMPLE_RATE, as_mono, encode_audio
from vllm_omni.entrypoints.openai.media_messages import image_content, to_base64, video_content
from vllm_omni.entrypoints.openai.protocol import MediaMessage
from vllm_omni.events import CompletedEvent
from vllm_omni.outputs import OmniRequestOutput


async def content_of(
    output: OmniRequestOutput, audio_format: str, audio_id: str, transcript: str = ""
) -> dict[str, Any]:
    """The fields of a chat message, or of a delta of one, for a whole output that is no text."""
    return await asyncio.to_thread(_content_of, output, audio_format, audio_id, transcript)


def _content_of(output: OmniRequestOutput, audio_format: str, audio_id: str, transcript: str) -> dict[str, Any]:
    if output.final_output_type == "image":
        return {"content": image_content(output)}
    if output.final_output_type == "video":
        return {"content": video_content(output)}
    samples = as_mono(output.multimodal_output["audio"])
    data = encode_audio(samples, audio_format, output.sample_rate or DEFAULT_SAMPLE_RATE)
    # Nothing is kept for a later turn: the audio expires when it is sent.
    audio = {"id": audio_id, "data": to_base64(data), "expires_at": int(time.time())}
    return {"content": None, "audio": {**audio, "transcript": transcript}}


async def add_media_choices(
    answer: ChatCompletionResponse,
    event: CompletedEvent,
    audio_format: str,
    config: PipelineConfig,
    mm_token_counts: dict[str, int] | None,
    *,
    shows_text: bool,
) -> None:
    """Adds a choice for each output that is no text; text that was not asked for is left out, but as a transcript."""
    transcript = answer.choices[0].message.content if answer.choices else None
    if not shows_text:
        answer.choices.clear()
    for output in event.outputs:
        if output.final_output_type != "text":
            audio_id = f"audio-{answer.id}"
            fields = await content_of(output, audio_format, audio_id, transcript or "")
            answer.choices.append(
                ChatCompletionResponseChoice(
                    index=len(answer.choices),
                    message=MediaMessage(role="assistant", **fields),
                    finish_reason=finish_reason_of(output),
                )
            )
    usage = answer.usage.model_dump()
    add_media_usage(usage, event, config, mm_token_counts)
    answer.usage = type(answer.usage)(**usage)


def finish_reason_of(output: OmniRequestOutput) -> str:
    """Why an output that is no text ended."""
    return (output.outputs[0].finish_reason if output.outputs else None) or "stop"


def add_media_usage(
    usage: dict[str, Any], event: CompletedEvent, config: PipelineConfig, mm_token_counts: dict[str, int] | None
) -> None:
    """Adds what stages wrote that is no text: the tokens of speech. Of the prompt: which of its tokens were sound."""
    audio_tokens = _num_audio_tokens(event, config)
    text_tokens = usage["completion_tokens"] or 0
    usage["completion_tokens"] = text_tokens + audio_tokens
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    details = {"reasoning_tokens": 0} | (usage.get("completion_tokens_details") or {})
    usage["completion_tokens_details"] = {**details, "audio_tokens": audio_tokens, "text_tokens": text_tokens}
    heard = (mm_token_counts or {}).get("audio")
    if heard:
        usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {}), "audio_tokens": heard}


def _num_audio_tokens(event: CompletedEvent, config: PipelineConfig) -> int:
    """What the stages wrote that lie between the text and the speech."""
    metrics = event.outputs[0].stage_metrics
    writers = [
        stage.stage_id
        for stage in config.stage_args
        if stage.kind == "AR" and not stage.final_output and not stage.is_comprehension
    ]
    return sum(stage.num_output_tokens for stage in metrics if stage.stage_id in writers)
