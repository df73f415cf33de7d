# SPDX-License-Identifier: Apache-2.0
"""What a pipeline makes besides text, as fields of a chat message and in the usage of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.entrypoints.openai.audio_formats import DEFAULT_SAMPLE_RATE, encode_audio, first_clip
from vllm_omni.entrypoints.openai.media_messages import image_parts, to_base64, video_parts
from vllm_omni.entrypoints.openai.transcripts import Transcripts, new_audio_id
from vllm_omni.events import CompletedEvent
from vllm_omni.outputs import OmniRequestOutput


def picture_fields(output: OmniRequestOutput) -> dict[str, Any]:
    """Images or videos as a field of a chat message. Takes long for large ones: for a thread."""
    if output.final_output_type == "image":
        return {"images": image_parts(output)}
    return {"videos": video_parts(output)}


def encode_speech(output: OmniRequestOutput, audio_format: str) -> str:
    """The file of whole speech, in base64. Takes long: for a thread."""
    samples = first_clip(output.multimodal_output["audio"])
    return to_base64(encode_audio(samples, audio_format, output.sample_rate or DEFAULT_SAMPLE_RATE))


async def add_media(
    answer: ChatCompletionResponse,
    event: CompletedEvent,
    audio_format: str,
    config: PipelineConfig,
    mm_token_counts: dict[str, int] | None,
    transcripts: Transcripts,
    *,
    shows_text: bool,
) -> None:
    """Adds the outputs that are not text to the message of the first choice.

    Args:
        transcripts: Keeps what is spoken, for later turns.
        shows_text: Whether the request includes text. Without it there is one choice, whose content is null.
    """
    media = [output for output in event.outputs if output.final_output_type != "text"]
    choice = answer.choices[0]
    fields = choice.message.model_dump()
    if not shows_text:
        fields = {"role": choice.message.role}
        choice.logprobs = None
        del answer.choices[1:]
    for output in media:
        if output.final_output_type == "audio":
            audio_id, transcript = new_audio_id(), _transcript_of(event)
            fields["audio"] = {
                "id": audio_id,
                "data": await asyncio.to_thread(encode_speech, output, audio_format),
                "transcript": transcript,
                "expires_at": transcripts.keep(audio_id, transcript),
            }
        else:
            fields |= await asyncio.to_thread(picture_fields, output)
    choice.message = type(choice.message)(**fields)
    choice.finish_reason = joint_finish_reason(choice.finish_reason, media)
    usage = answer.usage.model_dump()
    add_media_usage(usage, event, config, mm_token_counts)
    answer.usage = type(answer.usage)(**usage)


def _transcript_of(event: CompletedEvent) -> str:
    """What is spoken: the text of the first sequence, as the model wrote it; empty if the pipeline returns no text."""
    texts = (output.outputs[0].text for output in event.outputs if output.final_output_type == "text")
    return next(texts, "")


def finish_reason_of(output: OmniRequestOutput) -> str:
    """Why an output that is not text ended."""
    return (output.outputs[0].finish_reason if output.outputs else None) or "stop"


def joint_finish_reason(text_reason: str | None, media: Iterable[OmniRequestOutput]) -> str:
    """Why a choice ended: as its text did, but `length` where the text is complete and its speech was cut."""
    is_cut = any(finish_reason_of(output) == "length" for output in media)
    return "length" if is_cut and text_reason in (None, "stop") else text_reason or "stop"


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
