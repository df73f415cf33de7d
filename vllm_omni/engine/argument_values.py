# SPDX-License-Identifier: Apache-2.0
"""Checks the values of engine arguments by vLLM's own types and ranges, before vLLM computes with them.

`EngineArgs` has types that nothing checks. The ranges are those of its configuration classes, whose fields mostly have
the same names.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from vllm.config import (
    CacheConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.tokenizers import TokenizerRegistry

from vllm_omni.config.utils import nearest
from vllm_omni.errors import StageConfigError

_CONFIGS: tuple[Any, ...] = (
    *(ModelConfig, CacheConfig, ParallelConfig, SchedulerConfig),
    *(LoadConfig, LoRAConfig, MultiModalConfig, ObservabilityConfig),
)
_TYPES: dict[str, Any] = {field.name: field.type for field in fields(EngineArgs)}


def _tokenizer_modes() -> Iterable[str]:
    load_general_plugins()  # They may add some.
    return ("auto", *TokenizerRegistry.tokenizers)


_NAMES: dict[str, Callable[[], Iterable[str]]] = {"tokenizer_mode": _tokenizer_modes}
"""Arguments that are any string for vLLM, but for which only some are registered."""


def check_values(arguments: Mapping[str, Any]) -> None:
    """
    Args:
        arguments: Of `EngineArgs`, by name. None is the default of any.

    Raises:
        StageConfigError: A value has the wrong type or is out of range; names it, and what is allowed.
    """
    for name, value in arguments.items():
        adapter = None if value is None else _adapter(name)
        if adapter is None:
            continue
        try:
            # A number as a string would stay one. In lists and mappings YAML has no types for sets, tuples and classes.
            adapter.validate_python(value, strict=isinstance(value, (str, int, float)))
        except ValidationError as error:
            raise StageConfigError(f"{name}{_problem(error)}") from error
        if name in _NAMES and value not in (known := tuple(_NAMES[name]())):
            raise StageConfigError(f"{name}: {value!r} is not one of {', '.join(known)}{nearest(value, known)}")


def _problem(error: ValidationError) -> str:
    """`.key: 7 must be ...`; what each type of a union takes."""
    problems = error.errors(include_url=False, include_context=False)
    where = "".join(f".{key}" for key in problems[0]["loc"]) if len(problems) == 1 else ""
    reasons = (problem["msg"].replace("Input should be", "must be") for problem in problems)
    takes = " or ".join(dict.fromkeys(reason.replace("Value error, ", "is wrong: ") for reason in reasons))
    return f"{where}: {problems[0]['input']!r:.100} {takes}"


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any] | None:
    """The check of an argument by its type and the range of the configuration's field. None: its type says nothing."""
    kind = _TYPES[name]
    if isinstance(kind, str) or any(isinstance(one, type) and issubclass(one, Enum) for one in (kind, *get_args(kind))):
        return None  # vLLM finds an enum's member by its name.
    declared = next((each for config in _CONFIGS if (each := config.__pydantic_fields__.get(name))), None)
    for constraint in () if declared is None else declared.metadata:
        kind = Annotated[kind, constraint]
    try:
        return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # A dataclass of pydantic's has a configuration of its own.
        return TypeAdapter(kind)
