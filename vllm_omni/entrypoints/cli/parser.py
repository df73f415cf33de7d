# SPDX-License-Identifier: Apache-2.0
"""The parser of `vllm serve MODEL --omni`: vLLM's own, with our flags, and with an account of what the user gave.

A stage gets the flags that were given, never vLLM's defaults: each stage has values of its own in its configuration.
"""

import argparse
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from vllm.entrypoints.cli.types import CLISubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config.utils import nearest
from vllm_omni.entrypoints.cli.stage_flags import StageFlagError, fold_stage_flags


class UsageError(Exception):
    """A command line that cannot be used."""


class OmniArgumentParser(FlexibleArgumentParser):
    """Names the flag that may have been meant, reads `--stage.*`, and refuses files that cannot be read."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--?[\w-]+)", message)
        flags = [flag for action in self._every_action() for flag in action.option_strings]
        if unknown:
            message += nearest(unknown[1].replace("_", "-"), flags)
        super().error(message)

    def _every_action(self) -> list[argparse.Action]:
        """Those of its commands too: argparse complains of an unknown flag where the command line begins."""
        actions = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                actions += [a for parser in action.choices.values() for a in parser._actions]
        return actions

    def parse_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:  # type: ignore[override]
        try:
            # vLLM looks for the two words only.
            words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
            return super().parse_args(fold_stage_flags(words), namespace)
        except (ValueError, AssertionError, StageFlagError) as error:
            self.error(str(error))

    def load_config_file(self, file_path: str) -> list[str]:
        try:
            said = yaml.safe_load(Path(file_path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--config {file_path}: cannot be read: {error}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"--config {file_path}: is not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(said, dict):
            raise ValueError(f"--config {file_path}: must be a mapping of flags to values")
        dotted = [key for key in said if str(key).startswith("stage.")]
        if dotted:
            raise ValueError(
                f"--config {file_path}: {dotted[0]}: write it as a mapping: stage: {{NAME: {{KEY: VALUE}}}}"
            )
        # By another name than the command line's, which comes later and wins: vLLM warns of flags that come twice.
        return ["--stage-overrides" if word == "--stage" else word for word in super().load_config_file(file_path)]


@dataclass(frozen=True)
class ParsedCommand:
    """A command line.

    Attributes:
        args: Every flag's value.
        explicit: Those that were given, on the command line or in a `--config` file.
        plain: The same, as values that can be sent to another process: vLLM's parser makes objects of some.
        defaults: What each is where it is not given.
    """

    args: argparse.Namespace
    explicit: dict[str, Any]
    plain: dict[str, Any]
    defaults: dict[str, Any]


def parse_command(command: CLISubcommand, arguments: Sequence[str], prog: str) -> ParsedCommand:
    """Parses the words after the command's name; exits, as argparse does, with help or an error."""
    parser = OmniArgumentParser(prog=prog)
    subparser = command.subparser_init(parser.add_subparsers(dest="subparser"))
    parser.usage = subparser.usage
    line = [command.name, *arguments]
    if any(argument.split("=")[0] in ("-h", "--help") for argument in arguments):
        parser.parse_args(line)  # Now: its text shows the defaults.
    defaults = vars(parser.parse_args([command.name]))
    words: dict[str, str] = {}
    for action in subparser._actions:
        action.default = argparse.SUPPRESS
        if action.type is not None:
            action.type = _remember(action.type, action.dest, words)
    explicit = vars(parser.parse_args(line))
    explicit.pop("subparser")
    plain = {name: value if _is_plain(value) else _read(value, words[name]) for name, value in explicit.items()}
    return ParsedCommand(argparse.Namespace(**(defaults | explicit)), explicit, plain, defaults)


def _remember(convert: Any, name: str, words: dict[str, str]) -> Callable[[str], Any]:
    """The conversion, which also keeps what it was given."""

    @functools.wraps(convert)
    def remember(word: str) -> Any:
        words[name] = word
        return convert(word)

    return remember


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or type(value) in (str, int, float, bool)


def _read(value: Any, word: str) -> Any:
    """What was written for one of vLLM's objects: JSON, or a name."""
    if isinstance(value, int):  # a level, as an enum
        return int(value)
    return json.loads(word) if word.startswith("{") else word
