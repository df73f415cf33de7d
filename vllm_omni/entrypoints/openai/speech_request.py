# SPDX-License-Identifier: Apache-2.0
"""Requests for speech: their fields, and what of them is the model's prompt.

OpenAI's fields are for every model. Others are those that the model's `PromptProcessor` declares; a field that it does
not read is refused, except for those that clients of other servers send to every server (`WITHOUT_EFFECT`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from vllm.exceptions import VLLMValidationError

from vllm_omni.config.utils import nearest
from vllm_omni.entrypoints.openai.audio_formats import (
    MAX_SAMPLE_RATE,
    MAX_SPEED,
    MAX_VOLUME,
    MIN_SAMPLE_RATE,
    MIN_SPEED,
)
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import describe_wrong_fields
from vllm_omni.entrypoints.openai.json_body import decode, validator_of
from vllm_omni.entrypoints.openai.media_request import MediaFetcher, Priority, RequestModel, SoundUrl
from vllm_omni.entrypoints.openai.server_args import RequestLimits
from vllm_omni.entrypoints.openai.stage_params import without_nulls
from vllm_omni.entrypoints.openai.voices import VoiceStore
from vllm_omni.inputs import VOICE_FIELD

MAX_INPUT_CHARS = 4096

SPEED = "speed"

SpeechFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]

_NO_LANGUAGES = "this model has no choice of languages"
WITHOUT_EFFECT = {
    "language": _NO_LANGUAGES,
    "lang_code": _NO_LANGUAGES,
    "normalization_options": "the text is spoken as it is written",
    "backend": "this server has one model",
    "user": "this server knows API keys and no users",
    "task_type": "the model itself decides it",
}
"""Fields that clients of other servers send, and why they have no effect where the model does not read them."""

_FROM_PROMPTS = ("instructions", "ref_audio", "ref_text", "context", *WITHOUT_EFFECT)
"""Fields with the names that models give them."""

_FOREIGN = "Accepted for clients of other servers; has an effect only with a model that reads it."


def _is_not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("the text is blank")
    return value


def _as_json(value: Any) -> Any:
    """A form has lists and objects as JSON."""
    return decode(value, RequestLimits.max_request_values).value if isinstance(value, str) else value


Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_INPUT_CHARS), AfterValidator(_is_not_blank)]


def check_text(text: str, parameter: str) -> None:
    """
    Raises:
        VLLMValidationError: It is no `Text`.
    """
    try:
        validator_of(Text).validate_python(text)
    except ValidationError as error:
        reason, _ = describe_wrong_fields([{**each, "loc": (parameter,)} for each in error.errors()])
        raise VLLMValidationError(reason.removeprefix("the "), parameter=parameter) from error


class VoiceId(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = Field(description="Its name, or the id of an uploaded one.", examples=["ethan"])


class SpeechTurn(BaseModel):
    """An earlier turn of a conversation."""

    model_config = ConfigDict(extra="forbid")

    audio: SoundUrl = Field(description="Its sound: a data URI or an address.")
    text: Text | None = Field(None, description="What is said in it, of models that read it.")
    voice: str | None = Field(None, description="A voice of the model. Default: that of the request.")


class SpeechSettings(RequestModel):
    """How a text is spoken."""

    model_config = ConfigDict(extra="allow")  # Further fields of the model.

    model: str | None = Field(None, description="A name of GET /v1/models; default: the model that is served.")
    voice: str | VoiceId | None = Field(
        None, description="One of GET /v1/audio/voices; default, or 'default': the first of them.", examples=["alloy"]
    )
    instructions: str | None = Field(
        None,
        max_length=MAX_INPUT_CHARS,
        description="How to speak it. The system message of models that write what they speak; models that read no "
        "instructions do not use it.",
        examples=["Speak slowly and kindly."],
    )
    language: str | None = Field(
        None,
        max_length=100,
        description="The language of the text, by name or code, of models that have a choice.",
        examples=["english", "en"],
    )
    lang_code: str | None = Field(None, max_length=100, description="The same as language.")
    ref_audio: SoundUrl | None = Field(
        None,
        description="A recording of the voice to imitate, of models that read one: a file in a form; in JSON a data "
        "URI or an address.",
    )
    ref_text: Text | None = Field(None, description="What is said in ref_audio.")
    context: Annotated[list[SpeechTurn] | None, BeforeValidator(_as_json)] = Field(
        None, description="Earlier turns of the conversation, of models that read them."
    )
    response_format: SpeechFormat = Field(
        "mp3",
        description="The file's format. pcm: 16-bit little-endian samples without a header, channels interleaved.",
    )
    speed: float = Field(1.0, ge=MIN_SPEED, le=MAX_SPEED, description="Factor of the speed, at the same pitch.")
    sample_rate: int | None = Field(
        None,
        ge=MIN_SAMPLE_RATE,
        le=MAX_SAMPLE_RATE,
        description="Samples per second of the file; default: the model's. A codec that lacks it uses its next higher "
        "one. The header X-Sample-Rate has the file's.",
        examples=[16000],
    )
    volume_multiplier: float = Field(
        1.0, ge=0, le=MAX_VOLUME, description="Factor of the samples, which are then clipped."
    )
    priority: Priority = 0
    normalization_options: Any = Field(None, description=_FOREIGN)
    backend: Any = Field(None, description=_FOREIGN)
    user: Any = Field(None, description=_FOREIGN)
    task_type: Any = Field(None, description=_FOREIGN)
    sampling_params_list: Annotated[list[dict[str, Any] | None] | None, BeforeValidator(_as_json)] = Field(
        None,
        description="Sampling parameters of each stage, in stage order; null for a stage's defaults, and for the stage "
        "that writes the text.",
        examples=[[None, {"temperature": 0.7}, None]],
    )

    @model_validator(mode="after")
    def _has_one_language(self) -> Self:
        if self.language and self.lang_code and self.language.lower() != self.lang_code.lower():
            raise VLLMValidationError("language and lang_code differ; keep one of them", parameter="lang_code")
        return self

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice

    def prompt_fields(self) -> dict[str, Any]:
        """What is given of the model's own fields, and of those that it may not read."""
        given = {name: getattr(self, name) for name in _FROM_PROMPTS}
        return {**without_nulls(given), **(self.model_extra or {})}


class SpeechRequest(SpeechSettings):
    """A text to be spoken."""

    file_field = "ref_audio"

    input: Text = Field(
        description="The text to speak; for a model of sounds or music, its prompt.", examples=["Hello. How are you?"]
    )
    stream_format: Literal["audio", "sse"] = Field(
        "audio", description="How the speech is sent while it is made: the bytes of the file, or server-sent events."
    )
    stream: bool = Field(
        True,
        description="true: send the speech while it is made, as stream_format says. false: send the file when it is "
        "complete; its headers have its length.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> SpeechRequest:
        if not self.stream and self.stream_format == "sse":
            raise VLLMValidationError("stream_format 'sse' is a stream; leave stream out", parameter="stream")
        return self


class SpeechBatchRequest(SpeechSettings):
    """Texts to be spoken in the same way, each in a file of its own."""

    inputs: list[str] = Field(
        min_length=1,
        description=f"The texts, each of up to {MAX_INPUT_CHARS} characters.",
        examples=[["Hello.", "How are you?"]],
    )


class SpeechPromptReader:
    """Reads a request's voice, and the fields of the model, as a prompt's `additional_information`."""

    def __init__(self, client: OmniEngineClient, media: MediaFetcher, voices: VoiceStore) -> None:
        self._client = client
        self._media = media
        self._voices = voices

    @property
    def sets_speed(self) -> bool:
        """Whether the model speaks at the request's speed; otherwise its sound is changed."""
        return SPEED in self._client.prompt_fields

    async def read(self, request: SpeechSettings, owner: bytes) -> dict[str, Any]:
        """
        Args:
            owner: The hash of the client's API key.

        Raises:
            VLLMClientError: The model does not read a field, a voice is unknown, or a sound cannot be read.
            OmniError: The pipeline accepts no request now.
        """
        given = self._prompt_fields(request)
        for name in ("instructions", *WITHOUT_EFFECT):  # OpenAI's own, and others that every model may get
            if name not in self._client.prompt_fields:
                given.pop(name, None)
        check_read(given, self._client.prompt_fields, type(request).model_fields)
        given = {**self._voice_fields(request, owner), **given}
        if self.sets_speed and SPEED in request.model_fields_set:
            given[SPEED] = request.speed
        turns: list[SpeechTurn] = given.get("context", [])
        voices = [self._client.voices.read(turn.voice, f"context[{i}].voice") for i, turn in enumerate(turns)]
        if isinstance(given.get("ref_audio"), str):
            given["ref_audio"] = await self._media.voice(given["ref_audio"], "ref_audio")
        if turns:
            sounds = [await self._media.sound(turn.audio, f"context[{i}].audio") for i, turn in enumerate(turns)]
            given["context"] = [_as_turn(*each) for each in zip(turns, sounds, voices, strict=True)]
        return given

    def ignored(self, request: SpeechSettings) -> list[str]:
        """Fields of other servers that the request has and the model does not read."""
        given = self._prompt_fields(request)
        return [name for name in WITHOUT_EFFECT if name in given and name not in self._client.prompt_fields]

    def _prompt_fields(self, request: SpeechSettings) -> dict[str, Any]:
        given = request.prompt_fields()
        if "lang_code" in given and "language" in self._client.prompt_fields:
            given["language"] = given.pop("lang_code")
        return given

    def _voice_fields(self, request: SpeechSettings, owner: bytes) -> dict[str, Any]:
        name = request.voice_name
        stored = None if name is None else self._voices.find(name, owner)
        if stored is None:
            voice = self._client.voices.read(name, "voice")
            return {} if voice is None else {VOICE_FIELD: voice}
        if request.ref_audio is not None or request.ref_text is not None:
            raise VLLMValidationError(
                f"the voice {name!r} has a recording of its own; leave out the voice, or ref_audio and ref_text",
                parameter="voice",
            )
        return stored.prompt_fields


def _as_turn(turn: SpeechTurn, sound: tuple[np.ndarray, float], voice: str | None) -> dict[str, Any]:
    read = {"text": turn.text, "audio": sound, VOICE_FIELD: voice}
    return {name: value for name, value in read.items() if value is not None}


def check_read(names: Iterable[str], read: Collection[str], others: Iterable[str] = ()) -> None:
    """
    Args:
        names: Fields of a request that are not OpenAI's.
        read: Those that the model reads.
        others: All fields of such requests, for hints.

    Raises:
        VLLMValidationError: It does not read one; lists those that it reads.
    """
    known = sorted(set(read) - {VOICE_FIELD})
    for name in names:
        if name not in known:
            hint = nearest(name, [*known, *others])
            raise VLLMValidationError(
                f"this model reads no {name!r}{hint} (beside OpenAI's fields it reads {', '.join(known) or 'none'})",
                parameter=name,
            )
