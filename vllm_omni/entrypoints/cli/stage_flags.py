# SPDX-License-Identifier: Apache-2.0
"""Flags for single stages: `--stage.talker.engine_args.max_num_seqs 16`, as what `stage_overrides` takes.

Knows how they are written, not which stages and keys there are: `config.overrides` and the engines say that.
"""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

import yaml

from vllm_omni.config.overrides import SECTIONS, merge

PREFIX = "--stage."
HELP = """\
Override what one stage, by its name or id, has in the stage configuration: --stage.NAME.engine_args.KEY VALUE, and the
same with runtime.KEY and default_sampling_params.KEY. --stage.NAME.KEY is short for an engine argument. VALUE is read
as YAML. All at once, as JSON: --stage '{"NAME": {"engine_args": {"KEY": VALUE}}}'."""

_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class StageFlagError(ValueError):
    """A flag for a stage that cannot be read."""


def add_stage_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--stage",
        "--stage-overrides",
        dest="stage_overrides",
        type=_as_overrides,
        action=_MergeAction,
        default={},
        metavar="JSON",
        help=HELP.replace("\n", " "),
    )


class _MergeAction(argparse.Action):
    """Every flag adds to those before it, and wins over them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, merge(vars(namespace).get(self.dest) or {}, values))


def _as_overrides(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(stage, dict) for stage in value.values()):
        raise argparse.ArgumentTypeError(f'{text!r} is not of the form {{"NAME": {{"KEY": VALUE}}}}')
    return value


def fold_stage_flags(arguments: Sequence[str]) -> list[str]:
    """The command line with all `--stage.NAME.KEY VALUE` (or `=VALUE`) as one `--stage=JSON`.

    Raises:
        StageFlagError: One has no value, or names no key.
    """
    others: list[str] = []
    overrides: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith(PREFIX):
            others.append(argument)
            continue
        name, has_value, text = argument.partition("=")
        if not has_value:
            text = next(rest, PREFIX)
            if text.startswith("--"):
                raise StageFlagError(f"{name} needs a value")
        overrides = merge(overrides, _as_override(name, text))
    return [*others, f"--stage={json.dumps(overrides, default=str)}"] if overrides else others


def _as_override(name: str, text: str) -> dict[str, Any]:
    stage, *keys = name.removeprefix(PREFIX).split(".")
    if not stage or not all(keys):
        raise StageFlagError(f"{name} is incomplete; write --stage.NAME.engine_args.KEY VALUE")
    value: Any = read_value(text)
    if keys[:1] and keys[0].replace("-", "_") not in SECTIONS:
        keys.insert(0, "engine_args")
    keys = [key.replace("-", "_") if place < 2 else key for place, key in enumerate(keys)]
    if len(keys) < 2 and not isinstance(value, dict):
        raise StageFlagError(f"{name} {text}: names no key; write --stage.NAME.engine_args.KEY VALUE")
    for key in reversed(keys):
        value = {key: value}
    return {stage: value}


def read_value(text: str) -> Any:
    """A value as YAML has it; 1e-3 is a number too.

    Raises:
        StageFlagError: It is not YAML.
    """
    if _EXPONENT.fullmatch(text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise StageFlagError(f"{text!r} is not YAML: {' '.join(str(error).split())}") from error
