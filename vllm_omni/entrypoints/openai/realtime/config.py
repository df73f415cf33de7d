# SPDX-License-Identifier: Apache-2.0
"""The configuration of a realtime session: defaults, updates, what a response changes, and what is supported."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openai.types.realtime import RealtimeSessionCreateRequest
from openai.types.realtime.realtime_response_create_params import RealtimeResponseCreateParams
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.asr_stage import ASRStage
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.realtime import turn_detection
from vllm_omni.entrypoints.openai.realtime.audio import MAX_SPEED, MIN_SPEED
from vllm_omni.entrypoints.openai.realtime.protocol import EventError
from vllm_omni.entrypoints.openai.transcription_request import TranscriptionRequest
from vllm_omni.entrypoints.openai.transcriptions import accepts_audio, max_parts
from vllm_omni.entrypoints.openai.voices import DEFAULT_VOICE

Values = dict[str, Any]

_DEFAULT_OUTPUT_TOKENS = 4096
"""Left for an answer without a limit, as OpenAI's models, but at most a quarter of the context."""

_UNSUPPORTED = {
    "prompt": "send the text as instructions",
    "reasoning": "the model's chat template decides how it reasons",
    "tracing": "the server traces with --otlp-traces-endpoint",
    "include": "transcriptions have no log probabilities",
}
_TRANSCRIPTION_SETTINGS = {"language": "an ISO 639-1 code", "prompt": "at most 4096 characters"}
"""What each must be, for messages."""
_RESPONSE_FIELDS = (
    "instructions", "output_modalities", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """What a prompt of the model may have.

    Attributes:
        max_model_len: Tokens of a prompt and its answer.
        max_tokens: Of an answer by default; None: no limit.
        max_parts: Media by type, `audio` and `image`; a type that is not there has no limit.
    """

    max_model_len: int
    max_tokens: int | None = None
    max_parts: Mapping[str, int] = field(default_factory=dict)

    def max_input_tokens(self, max_output_tokens: int | str) -> int:
        """Tokens of a prompt that leaves room for an answer.

        Args:
            max_output_tokens: Of the answer, or `inf`.
        """
        room = self.max_tokens if max_output_tokens == "inf" else int(max_output_tokens)
        if room is None:
            room = min(_DEFAULT_OUTPUT_TOKENS, self.max_model_len // 4)
        return self.max_model_len - min(room, self.max_model_len // 2)


class SessionRules:
    """What the served model can do in a session, and the configuration that a session starts with."""

    def __init__(self, client: OmniEngineClient, asr_stage: ASRStage | None, max_media_parts: int) -> None:
        """
        Args:
            asr_stage: Transcribes the sounds of sessions; None: the model reads them.
            max_media_parts: Of one request.
        """
        self._asr_stage = asr_stage
        self._voices = client.voices
        self.speaks = "audio" in client.config.output_types
        self.accepts_audio = accepts_audio(client)
        self.max_images = min(max_media_parts, max_parts(client, "image"))
        self.prompt_limits = PromptLimits(
            max_model_len=client.model_config.max_model_len,
            max_tokens=client.default_sampling_params.get("max_tokens"),
            max_parts={"audio": max_parts(client, "audio"), "image": self.max_images},
        )

    def default(self, model: str) -> Values:
        """The configuration of a new session, without id: OpenAI's, as far as the model and the installation go."""
        detects = self.accepts_audio and turn_detection.is_installed()
        return {
            "type": "realtime",
            "object": "realtime.session",
            "model": model,
            "output_modalities": ["audio" if self.speaks else "text"],
            "instructions": "",
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_output_tokens": "inf",
            "truncation": "auto",
            "tracing": None,
            "prompt": None,
            "include": None,
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": 24000},
                    "transcription": None,
                    "noise_reduction": None,
                    "turn_detection": turn_detection.with_defaults({"type": "server_vad"}) if detects else None,
                },
                "output": {
                    "format": {"type": "audio/pcm", "rate": 24000},
                    "voice": DEFAULT_VOICE,
                    "speed": 1.0,
                },
            },
        }

    def updated(self, values: Values, update: RealtimeSessionCreateRequest) -> Values:
        """The configuration with the fields of an update.

        Raises:
            EventError: One of them is not supported; nothing has changed.
        """
        given = update.model_dump(exclude_unset=True)
        model = given.get("model")
        if model is not None and model != values["model"]:
            raise EventError(f"the model of a session cannot change; it is {values['model']!r}", "session.model")
        for name, reason in _UNSUPPORTED.items():
            if given.get(name):
                raise EventError(f"{name} is not supported: {reason}", f"session.{name}")
        if isinstance(truncation := given.get("truncation"), Mapping):
            self._check_truncation(truncation, "session.truncation")
        merged = _merged(values, {name: value for name, value in given.items() if name not in ("type", "model")})
        self._check(merged, "session")
        self._complete_input(merged["audio"]["input"], "session.audio.input")
        return merged

    def for_response(self, values: Values, params: RealtimeResponseCreateParams | None) -> Values:
        """The configuration of one response: the session's, with what the response sets.

        Raises:
            EventError: A field is not supported.
        """
        given = {} if params is None else params.model_dump(exclude_unset=True, exclude={"input"})
        for name in ("prompt", "reasoning"):
            if given.get(name):
                raise EventError(f"{name} is not supported: {_UNSUPPORTED[name]}", f"response.{name}")
        own = {name: given[name] for name in (*_RESPONSE_FIELDS, "audio") if given.get(name) is not None}
        merged = _merged(values, own)
        self._check(merged, "response")
        return merged

    def _check(self, values: Values, at: str) -> None:
        modalities = values["output_modalities"]
        known = ["audio", "text"] if self.speaks else ["text"]
        if modalities not in [[name] for name in known]:
            allowed = " or ".join(f'["{name}"]' for name in known)
            raise EventError(f"output_modalities must be {allowed} of this model", f"{at}.output_modalities")
        limit = values["max_output_tokens"]
        if limit != "inf" and limit < 1:
            raise EventError("max_output_tokens must be at least 1, or inf", f"{at}.max_output_tokens")
        self._check_tools(values, at)
        output = values["audio"]["output"]
        output["format"] = _complete_format(output["format"])
        if not MIN_SPEED <= output["speed"] <= MAX_SPEED:
            raise EventError(f"speed must be from {MIN_SPEED} to {MAX_SPEED}", f"{at}.audio.output.speed")
        voice = voice_name(output["voice"])
        try:
            self._voices.read(voice, "voice")
        except VLLMValidationError as error:
            raise EventError(str(error.args[0]), f"{at}.audio.output.voice") from error

    def _check_truncation(self, truncation: Mapping[str, Any], at: str) -> None:
        if not 0.0 <= truncation["retention_ratio"] <= 1.0:
            raise EventError("retention_ratio must be from 0 to 1", f"{at}.retention_ratio")
        limit = (truncation.get("token_limits") or {}).get("post_instructions")
        if limit is not None and not 1 <= limit <= self.prompt_limits.max_model_len:
            length = self.prompt_limits.max_model_len
            raise EventError(
                f"post_instructions must be from 1 to {length}, the model's context",
                f"{at}.token_limits.post_instructions",
            )

    def _check_tools(self, values: Values, at: str) -> None:
        for i, tool in enumerate(values["tools"]):
            if tool.get("type") not in (None, "function") or not tool.get("name"):
                raise EventError("a tool is a function with a name", f"{at}.tools[{i}]")
        choice = values["tool_choice"]
        if isinstance(choice, Mapping):
            names = [tool["name"] for tool in values["tools"]]
            if choice.get("type") != "function" or choice.get("name") not in names:
                raise EventError(f"tool_choice must name one of the tools: {', '.join(names)}", f"{at}.tool_choice")

    def _complete_input(self, values: Values, at: str) -> None:
        values["format"] = _complete_format(values["format"])
        if values["noise_reduction"] is not None:
            raise EventError("noise reduction is not supported; set it to null", f"{at}.noise_reduction")
        if values["transcription"] is not None:
            self._check_accepts_audio(f"{at}.transcription")
            self._check_transcription(values["transcription"], f"{at}.transcription")
        if values["turn_detection"] is not None:
            self._check_accepts_audio(f"{at}.turn_detection")
            values["turn_detection"] = turn_detection.with_defaults(values["turn_detection"])
            turn_detection.check(values["turn_detection"], f"{at}.turn_detection")

    def asr_settings(self, values: Values) -> dict[str, Any]:
        """What a session sets of the ASR stage's parameters."""
        return self._read_asr_settings(values["audio"]["input"]["transcription"] or {})

    def _read_asr_settings(self, given: Values) -> dict[str, Any]:
        if self._asr_stage is None:
            return {}
        request = transcription_request(given, "data:,")
        return self._asr_stage.settings({name: getattr(request, name) for name in _TRANSCRIPTION_SETTINGS})

    def _check_transcription(self, given: Values, at: str) -> None:
        for name, value in given.items():
            if value is not None and name not in ("model", *_TRANSCRIPTION_SETTINGS):
                raise EventError(f"transcription has no {name} here; it has language and prompt", f"{at}.{name}")
        for name, limit in _TRANSCRIPTION_SETTINGS.items():
            own = {name: given.get(name)}
            try:
                transcription_request(own, "data:,")
            except ValueError as error:
                raise EventError(f"{name} must be {limit}", f"{at}.{name}") from error
            if self._asr_stage is not None:
                try:
                    self._asr_stage.check(self._read_asr_settings(own))
                except (ValueError, TypeError) as error:
                    raise EventError(str(error), f"{at}.{name}") from error

    def _check_accepts_audio(self, param: str) -> None:
        if not self.accepts_audio:
            raise EventError("this model does not accept audio", param)


def voice_name(voice: Any) -> str | None:
    """The name in `"alloy"` or `{"id": "alloy"}`."""
    return voice["id"] if isinstance(voice, Mapping) else voice


def _merged(values: Values, given: Mapping[str, Any]) -> Values:
    """A copy with other values.

    `audio` and its parts keep what is not given, and a field that is null keeps its value, unless null switches it off.
    """
    merged = copy.deepcopy(values)
    for name, value in given.items():
        if name == "audio":
            for side, fields in (value or {}).items():
                for field, setting in (fields or {}).items():
                    if setting is not None or field in ("transcription", "turn_detection", "noise_reduction"):
                        merged["audio"][side][field] = setting
        elif value is not None:
            merged[name] = value
    return merged


def _complete_format(given: Values) -> Values:
    if (kind := given.get("type") or "audio/pcm") == "audio/pcm":
        return {"type": kind, "rate": 24000}
    return {"type": kind}


def transcription_request(given: Values, file: str) -> TranscriptionRequest:
    """A request for the text of a sound, streamed. The model is the session's, whatever OpenAI's name is given.

    Raises:
        ValueError: The language is unknown, or the prompt too long.
    """
    language, prompt = given.get("language") or None, given.get("prompt") or None
    fields = {"file": file, "language": language, "prompt": prompt, "stream": True}
    return TranscriptionRequest.model_validate(fields)
