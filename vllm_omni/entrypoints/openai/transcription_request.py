# SPDX-License-Identifier: Apache-2.0
"""Requests for the text of a sound, as in OpenAI's API, for models that know times and for those that do not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, AliasChoices, BeforeValidator, ConfigDict, Field, model_validator
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.media_request import NO_EFFECT, RequestModel, SoundUrl
from vllm_omni.entrypoints.openai.stage_params import without_nulls

Task = Literal["transcribe", "translate"]
"""`translate`: the text is English, whatever is spoken."""

_NO_TIMES = "this server's models say what is spoken, not when"
_NO_DIARIZATION = "this server's models do not tell who speaks"
_UNSUPPORTED_FIELDS = {
    "include": "log probabilities are not returned with transcriptions; /v1/chat/completions has them",
    "known_speaker_names": _NO_DIARIZATION,
    "known_speaker_references": _NO_DIARIZATION,
    "keywords": "name them in prompt",
    "languages": "name one as language, or leave it out",
}
_LANGUAGE = "{language}"
_STREAMED_FORMATS = ("json", "text")


def _read_language(given: str | None) -> str | None:
    """The code of a language that is given as in requests for speech: its code, with or without a region, or name."""
    name = (given or "auto").lower()
    if name == "auto":
        return None
    code = name if name in LANGUAGES else TO_LANGUAGE_CODE.get(name) or re.split("[-_]", name)[0]
    if code not in LANGUAGES:
        raise ValueError(f"unknown language {given!r}; it is an ISO 639-1 code, such as en or zh, a name, or auto")
    return code


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SoundRequest(RequestModel):
    """The fields that both have."""

    model_config = ConfigDict(extra="forbid")
    file_field = "file"

    formats: ClassVar[str]
    """Those that it may ask for, for messages."""
    unsupported_fields: ClassVar[Mapping[str, str]] = _UNSUPPORTED_FIELDS
    unsupported_formats: ClassVar[Mapping[str, str]] = {"diarized_json": _NO_DIARIZATION}
    has_word_times: ClassVar[bool] = False
    unknown_words: ClassVar[str]
    """Why there are no times of single words."""

    file: SoundUrl = Field(description="The sound: a file in a form; in JSON a data URI or an address.")
    model: str | None = Field(None, description="A name of GET /v1/models; default: the model that is served.")
    language: Annotated[str | None, AfterValidator(_read_language)] = Field(
        None,
        description="The language that is spoken: an ISO 639-1 code, also with a region, or an English name; auto: any",
        examples=["en"],
    )
    prompt: str | None = Field(
        None, max_length=4096, description="Names and words that occur, style, or what was said before."
    )
    temperature: float = Field(0.0, ge=0, le=1, description="0: the likeliest text.")
    stream: bool = Field(False, description="Server-sent events with the text as it is written.")
    chunking_strategy: Literal["auto"] | None = Field(None, description="The server decides how the sound is read.")
    user: str | None = Field(None, description=NO_EFFECT)
    response_format: str
    timestamp_granularities: Annotated[list[Literal["segment", "word"]], BeforeValidator(_as_list)] = Field(
        [],
        validation_alias=AliasChoices("timestamp_granularities", "timestamp_granularities[]"),
        description="segment, as by default, or word, of models that know the times of single words.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, fields: Any) -> Any:
        """OpenAI's fields and values that would change the result."""
        if not isinstance(fields, Mapping):
            return fields
        for name in without_nulls(fields):
            base = str(name).partition("[")[0]  # Forms have include[] and chunking_strategy[type].
            if base == "chunking_strategy" and fields[name] != "auto":
                raise VLLMValidationError("a sound is always read as a whole; leave it out", parameter=base)
            if reason := cls.unsupported_fields.get(base):
                raise VLLMValidationError(f"{base} is not supported: {reason}", parameter=base)
        wanted = fields.get("response_format")
        if isinstance(wanted, str) and (reason := cls.unsupported_formats.get(wanted)):
            raise VLLMValidationError(
                f"response_format {wanted} is not supported: {reason}; it may be {cls.formats}",
                parameter="response_format",
            )
        return fields

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if "word" in self.timestamp_granularities and not self.has_word_times:
            raise VLLMValidationError(self.unknown_words, parameter="timestamp_granularities")
        if self.stream and self.response_format not in _STREAMED_FORMATS:
            raise VLLMValidationError(
                f"response_format {self.response_format} is not streamed; it may be {' or '.join(_STREAMED_FORMATS)}",
                parameter="stream",
            )
        return self


class TranscriptionRequest(SoundRequest):
    """Speech to be transcribed by a model that does not know times."""

    formats = "json, text or verbose_json"
    unsupported_formats: ClassVar[Mapping[str, str]] = {
        **SoundRequest.unsupported_formats,
        **dict.fromkeys(("srt", "vtt"), _NO_TIMES),
    }
    unknown_words = f"timestamp_granularities may not have word: {_NO_TIMES}"

    response_format: Literal["json", "text", "verbose_json"] = "json"

    def instruction(self, stage_prompt: str) -> str:
        """The request to the model.

        Args:
            stage_prompt: `transcription_prompt` or `translation_prompt` of its stage.
        """
        language = "" if self.language is None else f"{LANGUAGES[self.language].title()} "
        instruction = stage_prompt.replace(f"{_LANGUAGE} ", language).replace(_LANGUAGE, language.rstrip())
        return f"{instruction} {self.prompt}" if self.prompt else instruction

    def as_chat(self, stage_prompt: str) -> OmniChatCompletionRequest:
        """The request for its text; for the argument see `instruction`."""
        content = [
            {"type": "audio_url", "audio_url": {"url": self.file}},
            {"type": "text", "text": self.instruction(stage_prompt)},
        ]
        return OmniChatCompletionRequest.model_validate(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": content}],
                "modalities": ["text"],
                "temperature": self.temperature,
                "stream": self.stream,
                "stream_options": {"include_usage": True} if self.stream else None,
            }
        )


class TimedTranscriptionRequest(SoundRequest):
    """Speech to be transcribed by a model that knows times."""

    formats = "json, text, verbose_json, srt or vtt"
    unknown_words = "the times of segments are known, those of words are not; leave word out"

    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = Field(
        "json",
        description="The last three have times, which only models such as Whisper know. Of other models verbose_json "
        "has the length of the sound, and no segments.",
    )

    @property
    def has_times(self) -> bool:
        """Whether the answer has the times of segments."""
        return self.response_format in ("verbose_json", "srt", "vtt")


class WordTimedTranscriptionRequest(TimedTranscriptionRequest):
    """Speech to be transcribed by a model that knows the times of words."""

    has_word_times = True
