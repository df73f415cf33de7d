# SPDX-License-Identifier: Apache-2.0
"""Voices: the model's own by their names in requests, and reference voices that clients have uploaded.

OpenAI's names are mapped to the model's voices, for all models. An uploaded voice is kept in memory, bounded in number,
bytes and time; it belongs to the API key that uploaded it, for other keys it does not exist. Does not know how voices
are made or used. For use from one event loop.
"""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import numpy as np
import openai.types.audio
from pydantic import Field
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.server_args import ServerLimits, flag

OPENAI_VOICES = (
    "alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse", "marin", "cedar",
)  # fmt: skip
DEFAULT_VOICE = "default"
"""The name of the model's first voice, and of the only one of a model without a choice of voices."""


class Voices:
    """The voices of one model. Names are compared without case.

    Attributes:
        names: The model's own, the default one first; empty if there is no choice.
        map: Every other name, and the voice that it means.
    """

    def __init__(self, names: Sequence[str], voice_map: Mapping[str, str]) -> None:
        """
        Args:
            names: The model's voices, in lower case (`AsyncOmniLLM.voices`).
            voice_map: Voices by further names, see `--voice-map`. OpenAI's names that are not in it are spread over
                the model's voices in turn.

        Raises:
            ValueError: A name in `voice_map` is the model's own, or means a voice that the model does not have.
        """
        self.names = list(names)
        given = {name.lower(): voice.lower() for name, voice in voice_map.items()}
        own = [*names, DEFAULT_VOICE]
        for name, voice in given.items():
            if name in own:
                raise ValueError(f"{name!r} is a voice of the model and cannot be mapped to another")
            if voice not in own:
                raise ValueError(f"{name!r} is mapped to an unknown voice {voice!r}; the model has {', '.join(own)}")
        targets = self.names or [DEFAULT_VOICE]
        spread = {name: targets[i % len(targets)] for i, name in enumerate(OPENAI_VOICES) if name not in own}
        self.map = spread | given

    def __contains__(self, name: str) -> bool:
        """Whether a name, in lower case, means a voice of the model."""
        return name == DEFAULT_VOICE or name in self.names or name in self.map

    def read(self, voice: str | None, parameter: str) -> str | None:
        """The model's voice that a request names; None: the default one.

        Args:
            voice: A name; None: the default.
            parameter: The request's field, for the error.

        Raises:
            VLLMValidationError: There is no such voice; lists the known ones.
        """
        name = DEFAULT_VOICE if voice is None else voice.lower()
        name = self.map.get(name, name)
        if name == DEFAULT_VOICE:
            return None
        if name not in self.names:
            known = ", ".join([*(self.names or [DEFAULT_VOICE]), *self.map])
            raise VLLMValidationError(f"unknown voice {voice!r}; there are {known}", parameter=parameter)
        return name


class CustomVoice(openai.types.audio.Voice):
    """OpenAI's object of a voice that was made of a recording, with what was uploaded beside the recording."""

    object: Literal["audio.voice"] = "audio.voice"
    type: Literal["audio_sample"] = "audio_sample"
    consent: str = Field(description="Why the voice may be used, as it was uploaded.")
    ref_text: str | None = Field(None, description="What is said in the recording.")
    language: str | None = Field(None, description="The language that it speaks, unless a request names another.")
    seconds: float = Field(description="Length of the recording.")
    expires_at: int = Field(description="When the server removes it.")
    shared: bool = Field(
        description="Whether the server has no API keys: then every client can list, use and delete it."
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredVoice:
    """
    Attributes:
        voice: Its description for its client.
        owner: The hash of its client's API key.
        sound: float32 `[samples]`, and samples per second.
    """

    voice: CustomVoice
    owner: bytes
    sound: tuple[np.ndarray, float]

    @property
    def num_bytes(self) -> int:
        return self.sound[0].nbytes

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """Keys of a prompt's `additional_information`."""
        fields = {"ref_audio": self.sound, "ref_text": self.voice.ref_text, "language": self.voice.language}
        return {name: value for name, value in fields.items() if value is not None}


class VoiceStore:
    """All voices, oldest first. Names are compared without case."""

    def __init__(self, limits: ServerLimits) -> None:
        self._max_voices = limits.max_stored_voices
        self._max_bytes = limits.max_stored_voice_bytes
        self._max_total_bytes = limits.max_total_stored_voice_bytes
        self._keep_s = limits.voice_expires_after_s
        self._stored: dict[str, StoredVoice] = {}

    def check_name(self, name: str, owner: bytes) -> None:
        """
        Raises:
            VLLMValidationError: The owner has a voice of this name.
        """
        if self.find(name, owner) is not None:
            raise VLLMValidationError(f"there is a voice {name!r}; delete it, or choose another name", parameter="name")

    def add(self, owner: bytes, sound: tuple[np.ndarray, float], **fields: Any) -> CustomVoice:
        """Keeps a voice.

        Args:
            fields: Further fields of `CustomVoice`.

        Raises:
            VLLMValidationError: The owner has one of this name, or as many as are kept.
            OmniHTTPError: The voices of all owners leave no room.
        """
        self.check_name(fields["name"], owner)
        kept = self._of(owner)
        if len(kept) >= self._max_voices:
            raise VLLMValidationError(
                f"{len(kept)} voices are kept for one API key ({flag('max_stored_voices')}); delete one"
            )
        if sound[0].nbytes + sum(stored.num_bytes for stored in kept) > self._max_bytes:
            raise VLLMValidationError(
                f"{self._max_bytes} bytes of decoded recordings are kept for one API key "
                f"({flag('max_stored_voice_bytes')}); delete voices, or send a shorter recording",
                parameter="audio_sample",
            )
        if sound[0].nbytes + sum(stored.num_bytes for stored in self._stored.values()) > self._max_total_bytes:
            raise OmniHTTPError(
                f"{self._max_total_bytes} bytes of decoded recordings are kept for all clients "
                f"({flag('max_total_stored_voice_bytes')}); try again later, or send a shorter recording",
                HTTPStatus.INSUFFICIENT_STORAGE,
            )
        now = time.time()
        voice = CustomVoice(
            id=f"voice_{secrets.token_hex(16)}",
            created_at=int(now),
            expires_at=int(now + self._keep_s),
            seconds=round(len(sound[0]) / sound[1], 3),
            shared=not owner,
            **fields,
        )
        sound[0].setflags(write=False)  # Many requests read it.
        self._stored[voice.id] = StoredVoice(voice=voice, owner=owner, sound=sound)
        asyncio.get_running_loop().call_later(self._keep_s, self._stored.pop, voice.id, None)
        return voice

    def find(self, name: str, owner: bytes) -> StoredVoice | None:
        """An owner's voice by its id or name."""
        for stored in self._of(owner):
            if stored.voice.id == name or stored.voice.name.lower() == name.lower():
                return stored
        return None

    def get(self, name: str, owner: bytes) -> CustomVoice:
        """
        Raises:
            VLLMNotFoundError: This owner has no voice of this id or name, or it has expired.
        """
        stored = self.find(name, owner)
        if stored is None:
            raise VLLMNotFoundError(f"there is no uploaded voice {name!r}; it may have expired")
        return stored.voice

    def voices(self, owner: bytes) -> list[CustomVoice]:
        """An owner's voices, oldest first."""
        return [stored.voice for stored in self._of(owner)]

    def delete(self, name: str, owner: bytes) -> CustomVoice:
        """Removes a voice; requests that have started keep it.

        Raises:
            VLLMNotFoundError: See `get`.
        """
        voice = self.get(name, owner)
        del self._stored[voice.id]
        return voice

    def _of(self, owner: bytes) -> list[StoredVoice]:
        return [stored for stored in self._stored.values() if stored.owner == owner]
