# SPDX-License-Identifier: Apache-2.0
"""The parameters of requests for stages that are a `FunctionStage`, and for those that transcribe, checked in the
caller's process."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig
from vllm_omni.config.utils import convert, nearest, split_error
from vllm_omni.errors import StageConfigError
from vllm_omni.inputs import VOICE_FIELD, TranscriptionParameters

VOICE = "voice"
"""The parameter that a prompt sets as `VOICE_FIELD`."""
REF_AUDIO = "ref_audio"
"""The key of a prompt's `additional_information` that is the sound beside its text, as `multi_modal_data["audio"]`."""


class FunctionParameters:
    """Reads the parameters of one stage.

    Attributes:
        names: Those that a request may set.
        voices: The values of `voice` in lower case, the default one first.
        sound_rate: Samples per second of the sound that the stage reads beside its text; None: it reads none.
    """

    def __init__(
        self,
        stage: OmniStageConfig,
        parameters: type[msgspec.Struct],
        defaults: Mapping[str, Any],
        voices: Sequence[str] = (),
        sound_rate: int | None = None,
    ) -> None:
        """
        Args:
            defaults: The stage's, of its `default_sampling_params`.

        Raises:
            StageConfigError: The class is wrong, or it does not take the stage's `default_sampling_params`.
        """
        self._stage = stage
        self._type = parameters
        self.names = self._type.__struct_encode_fields__
        self.sound_rate = sound_rate
        self._voices = {name.lower(): name for name in voices}
        if self._voices and VOICE not in self.names:
            raise StageConfigError(f"{stage.label}: {stage.function} has voices, but no parameter {VOICE!r}")
        try:
            self._defaults = self._check(defaults)
            every = msgspec.to_builtins(convert(self._defaults, self._type))
        except (ValueError, TypeError) as error:  # Also of a field without a default.
            raise StageConfigError(f"{stage.label}: default_sampling_params: {error}") from error
        default = str(every.get(VOICE)).lower()
        self.voices = tuple(sorted(self._voices, key=lambda name: name != default))

    @property
    def prompt_fields(self) -> frozenset[str]:
        """The keys of a prompt's `additional_information` that set parameters, and `REF_AUDIO` if it reads a sound."""
        own = frozenset(VOICE_FIELD if name == VOICE else name for name in self.names)
        return own if self.sound_rate is None else own | {REF_AUDIO}

    def read(self, given: Any, information: Mapping[str, Any]) -> dict[str, Any]:
        """
        Args:
            given: The stage's entry of `sampling_params_list`.
            information: The prompt's `additional_information`.

        Returns:
            The parameters that are not the defaults of the class, as plain values.

        Raises:
            ValueError, TypeError: One is unknown, or has a wrong value; names it.
        """
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"stage {self._stage.name!r} takes a dict of its parameters ({self._list()}), not a "
                f"{type(given).__name__}"
            )
        keys = {VOICE_FIELD if name == VOICE else name: name for name in self.names}
        prompted = {keys[key]: value for key, value in information.items() if key in keys}
        return self._check({**self._defaults, **prompted, **(given or {})})

    def _check(self, values: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(values)
        for name, value in values.items():
            if name not in self.names:
                hint = nearest(str(name), self.names)
                raise ValueError(
                    f"unknown parameter {name!r} for stage {self._stage.name!r}{hint} (known: {self._list()})"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} {value}: must be a finite number")
        if self._voices and isinstance(voice := values.get(VOICE), str):
            if voice.lower() not in self._voices:
                hint = nearest(voice.lower(), self._voices)
                raise ValueError(f"unknown voice {voice!r}{hint}; there are {', '.join(self._voices.values())}")
            values[VOICE] = self._voices[voice.lower()]
        try:
            plain = msgspec.to_builtins(convert(values, self._type))
            msgspec.msgpack.encode(plain)
        except msgspec.ValidationError as error:
            problem, name = split_error(error)
            annotation = get_type_hints(self._type).get(name)
            if get_origin(annotation) is Literal and "enum value" in problem:
                problem += f"; there are {', '.join(map(str, get_args(annotation)))}"
            raise ValueError(f"{name + ': ' if name else ''}{problem} (stage {self._stage.name!r})") from error
        except OverflowError as error:
            raise ValueError(f"a parameter of stage {self._stage.name!r} is too large: {error}") from error
        return {name: plain[name] for name in values}

    def _list(self) -> str:
        return ", ".join(self.names) or "none"


class TranscriptionSettings(FunctionParameters):
    """The parameters of a vLLM stage that transcribes. They are beside vLLM's sampling parameters, and only there: a
    prompt's `additional_information` sets none."""

    def __init__(self, stage: OmniStageConfig) -> None:
        super().__init__(stage, TranscriptionParameters, _own(stage.default_sampling_params))

    @property
    def prompt_fields(self) -> frozenset[str]:
        return frozenset()

    def read(self, given: Any, information: Mapping[str, Any]) -> dict[str, Any]:
        return super().read(_own(given) if isinstance(given, Mapping) else {}, {})


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in TranscriptionParameters.__struct_fields__}


def load_function_parameters(config: PipelineConfig) -> dict[int, FunctionParameters]:
    """The parameters of all stages that are a `FunctionStage`, or transcribe, by stage id.

    Raises as `FunctionParameters`.
    """
    found = {stage.stage_id: stage.kind.load_parameters() for stage in config.stage_args}
    return {stage_id: parameters for stage_id, parameters in found.items() if parameters is not None}
