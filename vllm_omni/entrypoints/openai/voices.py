# SPDX-License-Identifier: Apache-2.0
"""The names of voices in requests: the model's own, and others mapped to these, as OpenAI's are for all models."""

from collections.abc import Mapping, Sequence

from vllm.exceptions import VLLMValidationError

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
