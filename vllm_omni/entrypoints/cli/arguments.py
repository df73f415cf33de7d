# SPDX-License-Identifier: Apache-2.0
"""Our own flags, made from where the options themselves are: the constructor of the faces, and `DiTConfig`.

A new option there is a flag here, with the same words for help.
"""

import argparse
import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import yaml

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.entrypoints.cli.stage_flags import add_stage_flags
from vllm_omni.entrypoints.omni_base import OmniBase

# `log_stats` is the contrary of vLLM's --disable-log-stats, `model` is positional, overrides have flags of their own,
# the fork server is the program's.
_NOT_FLAGS = {"self", "model", "log_stats", "stage_overrides", "fork_server", "engine_args"}
# What a stage is, and not how it runs: a stage configuration says that.
_NOT_FOR_ALL_STAGES = {"model", "model_stage", "engine_output_type", "part"}


def base_options() -> dict[str, inspect.Parameter]:
    """The options of `AsyncOmniLLM` that have a flag of their own, by name."""
    parameters = inspect.signature(OmniBase.__init__).parameters
    return {name: parameter for name, parameter in parameters.items() if name not in _NOT_FLAGS}


def add_pipeline_flags(group: argparse._ActionsContainer) -> None:
    """`--omni`, a flag for every option of `AsyncOmniLLM`, and `--stage`."""
    group.add_argument(
        "--omni",
        action="store_true",
        help="Serve the model as a pipeline of stages; `vllm-omni serve` needs no --omni.",
    )
    hints = typing.get_type_hints(OmniBase.__init__, {"Mapping": Mapping, "Any": Any, "ForkServer": Any})
    said = _descriptions(OmniBase.__init__.__doc__ or "", r"\n {12}(\w+): ")
    for name, parameter in base_options().items():
        _add_flag(group, name, hints[name], parameter.default, said.get(name, ""))
    add_stage_flags(group)


def add_diffusion_flags(group: argparse._ActionsContainer, taken: set[str]) -> set[str]:
    """A flag for every setting of diffusion stages that vLLM has none for; returns their names.

    Args:
        taken: Names of vLLM's own flags. Those that mean the same (`--dtype`, `--revision`) reach diffusion stages too.
    """
    said = _descriptions(DiTConfig.__doc__ or "", r"\n {8}([\w, ]+): ")
    hints = typing.get_type_hints(DiTConfig)
    added = set()
    for field in msgspec.structs.fields(DiTConfig):
        if field.name not in taken | _NOT_FOR_ALL_STAGES:
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            _add_flag(group, field.name, hints[field.name], default, said.get(field.name, ""))
            added.add(field.name)
    return added


def _add_flag(group: argparse._ActionsContainer, name: str, hint: Any, default: Any, said: str) -> None:
    flag, said = "--" + name.replace("_", "-"), said.replace("%", "%%")
    kinds = [kind for kind in _alternatives(hint) if kind is not type(None)]
    if typing.get_origin(kinds[0]) is Literal:
        group.add_argument(flag, choices=typing.get_args(kinds[0]), default=default, help=said)
    elif kinds == [bool]:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=said)
    elif kinds[0] in (int, float, str):
        group.add_argument(flag, type=kinds[0], default=default, help=said)
    else:
        group.add_argument(flag, type=_as_mapping, default=default, metavar="JSON", help=said)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of `A | B`; of anything else, itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _as_mapping(text: str) -> dict[str, Any]:
    """JSON, or YAML's shorter way to write it: `{threshold: 0.1}`."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither JSON nor YAML") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {{KEY: VALUE}}")
    return value


def _descriptions(docstring: str, heading: str) -> dict[str, str]:
    """What a docstring says of each name; one description may be for several."""
    parts = re.split(heading, docstring)
    said = {}
    for names, text in zip(parts[1::2], parts[2::2], strict=True):
        for name in names.split(", "):
            said[name] = " ".join(text.split("\n\n")[0].split())
    return said
