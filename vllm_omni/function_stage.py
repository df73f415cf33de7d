# SPDX-License-Identifier: Apache-2.0
"""`FunctionStage`: the base class of stages that are a Python class, for libraries that keep a model and state.

The stage configuration names the class as `function` of a stage of the type `function`. The class is imported in the
caller's process too, for its `parameters` and `voices`: its module imports large libraries in `start` only.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from vllm_omni.config.loader import resolve_dotted_path
from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.errors import StageConfigError
from vllm_omni.inputs import StageRequest
from vllm_omni.outputs import StageOutput

Values: TypeAlias = dict[str, Any] | Iterator[dict[str, Any]]
"""A piece of output, or an iterator of pieces: tensors, plain values, and `text` for a text output, by name."""


CALLER = -1
"""The key in `sources` of what a caller gives a stage without sources, and its `stage_id` in any case."""
SOUND_RATE = 16_000
"""Samples per second of a sound that a caller gives a stage: `tensors["audio"]`, float32 `[samples]`. An image is
`tensors["image"]`, uint8 `[height, width, 3]`."""


class NoParameters(msgspec.Struct):
    """The parameters of a stage without any."""


class FunctionStage(ABC):
    """Computes one stage. There is one object in the stage's process, for all requests.

    For each request: `begin`, then `window` for each window of its input, then `end`; if it fails or is aborted after
    `begin`, `abort` instead of the rest. These calls of one request follow each other. With `runtime.max_batch_size`
    above 1, calls for as many requests run at the same time, in threads: calls of one request may be in several of
    them, and the library should release the interpreter's lock. An exception fails only its request.

    Attributes:
        stage: The stage's configuration; its own settings are in `engine_args`.
        model: The stage's checkpoint: `engine_args.model`, else that of the pipeline.
    """

    parameters: ClassVar[type[msgspec.Struct]] = NoParameters
    """The parameters of a request, each with a default. `default_sampling_params` of the stage configuration replace
    defaults; a request sets them in the stage's entry of `sampling_params_list`, or by the names of fields of its
    prompt's `additional_information`. A value of a wrong type, or out of the range that a `msgspec.Meta` gives, is
    refused before anything runs, and so is an unknown name. Requests for speech set `voice` (one of `voices`), `speed`,
    `language` and `instructions`, as far as they are declared."""

    model_kind: ClassVar[str | None] = None
    """Of a class that reads no checkpoint: the kind of the stage where a caller gives it one (`engine_args.model`)."""

    def __init__(self, stage: OmniStageConfig, model: str) -> None:
        self.stage = stage
        self.model = model

    @classmethod
    def voices(cls) -> Sequence[str]:
        """The values of the parameter `voice`, the default one first; case does not matter. Loads nothing."""
        return ()

    def start(self) -> None:  # noqa: B027 (optional)
        """Loads what the stage needs; slow. Called once, before the first request."""

    @abstractmethod
    def begin(self, request: StageRequest, parameters: Any) -> Any:
        """
        Args:
            parameters: The request's, an object of the class's `parameters`.

        Returns:
            The state of the request, of any type, for the calls that follow.
        """

    @abstractmethod
    def window(self, state: Any, sources: Mapping[int, StageOutput]) -> Values:
        """
        Args:
            sources: The outputs of the stage's sources, by stage id: whole, or, where an edge has a window size, its
                next window (`start`, `context` and `is_last` describe it). What a caller gives a stage that `accepts`
                it is under the id of its source, else under `CALLER`. Empty for any other stage without sources, which
                has one window.

        Returns:
            The output for this window. Of an iterator each piece is sent when it is made; an abort stops it between
            two pieces.
        """

    def end(self, state: Any) -> Values | None:
        """Releases the state after the last window, and may return a last part of the output."""
        return None

    def abort(self, state: Any) -> None:  # noqa: B027 (optional)
        """The request failed, or was aborted, before `end` was complete: releases the state."""


def load_function_stage(stage: OmniStageConfig) -> type[FunctionStage] | None:
    """The class that a stage is; None for a plain function, and for other types of stages.

    Raises:
        StageConfigError: It is another kind of class.
    """
    if stage.function is None:
        return None
    function = resolve_dotted_path(stage.function, f"{stage.label}: function")
    if not isinstance(function, type):
        return None
    if not issubclass(function, FunctionStage):
        raise StageConfigError(f"{stage.label}: function: the class {stage.function} does not extend FunctionStage")
    return function
