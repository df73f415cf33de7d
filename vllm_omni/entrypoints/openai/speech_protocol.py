# SPDX-License-Identifier: Apache-2.0
"""What a speech request and the events of its stream are; OpenAI's, and what is ours."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_omni.entrypoints.openai.audio_formats import MAX_SPEED, MIN_SPEED

MAX_INPUT_CHARS = 4096

SpeechFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class VoiceId(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = Field(description="Its name.", examples=["ethan"])


class SpeechRequest(BaseModel):
    """A text to be spoken."""

    model_config = ConfigDict(extra="forbid")

    input: str = Field(
        min_length=1,
        max_length=MAX_INPUT_CHARS,
        description="The text to speak; of a model of sounds or music, what is to be heard.",
        examples=["Hello. How are you?"],
    )
    model: str | None = Field(None, description="A name of GET /v1/models; default: the model that is served.")
    voice: str | VoiceId | None = Field(
        None, description="One of GET /v1/audio/voices; default, or 'default': the first of them.", examples=["alloy"]
    )
    instructions: str | None = Field(
        None,
        max_length=MAX_INPUT_CHARS,
        description="How to speak it: the system message of models that write what they speak. Other models do not "
        "use it.",
        examples=["Speak slowly and kindly."],
    )
    response_format: SpeechFormat = Field(
        "mp3",
        description="The file's format. pcm: 16-bit little-endian samples without a header, channels interleaved.",
    )
    speed: float = Field(
        1.0, ge=MIN_SPEED, le=MAX_SPEED, description="How many times as fast it is spoken, at the same pitch."
    )
    stream_format: Literal["audio", "sse"] = Field(
        "audio", description="How the speech is sent while it is made: the bytes of the file, or server-sent events."
    )
    sampling_params_list: list[dict[str, Any] | None] | None = Field(
        None,
        description="Sampling parameters of each stage, in stage order; null for a stage's defaults, and for the stage "
        "that writes the text.",
        examples=[[None, {"temperature": 0.7}, None]],
    )

    @field_validator("input")
    @classmethod
    def _is_something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("there is nothing to speak in it")
        return value


class SpeechUsage(BaseModel):
    """
    Attributes:
        input_tokens: Of the prompt and the text.
        output_tokens: Of the speech.
    """

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(BaseModel):
    """The next bytes of the file, in base64."""

    type: Literal["speech.audio.delta"] = "speech.audio.delta"
    audio: str


class SpeechDone(BaseModel):
    """The file is complete.

    Attributes:
        finish_reason: `stop`, or `length` where the model may speak no longer and the end of the text is missing.
    """

    type: Literal["speech.audio.done"] = "speech.audio.done"
    finish_reason: str
    usage: SpeechUsage


class VoiceList(BaseModel):
    voices: list[str] = Field(
        description="The model's voices, the default one first; empty where there is none to choose."
    )
    voice_map: dict[str, str] = Field(description="Further names, each with the voice that it means.")
