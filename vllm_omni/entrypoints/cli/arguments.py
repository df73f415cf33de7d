# SPDX-License-Identifier: Apache-2.0
"""The parser of `vllm serve MODEL --omni`: vLLM's parser with our flags, which separates explicit values from defaults.

A stage gets explicit flags only, never vLLM's defaults: each stage has its own values in the stage configuration.
Flags for single stages (`--stage.NAME.engine_args.max_num_seqs 16`) become one value, as `stage_overrides` takes it.
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

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.loader import UniqueKeyLoader
from vllm_omni.config.omni_args import PipelineOptions
from vllm_omni.config.overrides import SECTIONS, STAGE_KEYS, merge
from vllm_omni.config.utils import nearest
from vllm_omni.entrypoints.cli.serve_help import HINT
from vllm_omni.entrypoints.cli_args import add_cli_args, parse_json_object

# Properties of one stage, set in the stage configuration.
_NOT_FOR_ALL_STAGES = {"model", "model_stage", "engine_output_type", "part"}
_STAGE_PREFIX = "--stage."
_STAGE_HELP = """\
Override what one stage, by its name or id, has in the stage configuration: --stage.NAME.engine_args.KEY VALUE, and the
same with runtime.KEY and default_sampling_params.KEY. --stage.NAME.KEY is short for an engine argument. VALUE is parsed
as YAML. All at once, as JSON: --stage '{"NAME": {"engine_args": {"KEY": VALUE}}}'."""
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


def add_pipeline_flags(group: argparse._ActionsContainer) -> None:
    """`--omni`, a flag for every one of `PipelineOptions`, and `--stage`."""
    group.add_argument(
        "--omni",
        action="store_true",
        help="Serve the model as a pipeline of stages; `vllm-omni serve` needs no --omni.",
    )
    add_cli_args(group, PipelineOptions)
    group.add_argument(
        "--stage",
        "--stage-overrides",
        dest="stage_overrides",
        type=_as_overrides,
        action=_MergeAction,
        default={},
        metavar="JSON",
        help=_STAGE_HELP.replace("\n", " "),
    )


def add_diffusion_flags(group: argparse._ActionsContainer, vllm_flags: set[str]) -> None:
    """A flag for every setting of diffusion stages without a flag of vLLM's.

    Args:
        vllm_flags: Names of vLLM's flags. Those of the same name (`--dtype`, `--revision`) reach diffusion stages too.
    """
    add_cli_args(group, DiTConfig, exclude=vllm_flags | _NOT_FOR_ALL_STAGES, types={"cache_config": _as_mapping})


def _as_mapping(text: str) -> dict[str, Any]:
    """JSON, or the shorter YAML: `{threshold: 0.1}`."""
    try:
        value = yaml.load(text, UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither JSON nor YAML") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {{KEY: VALUE}}")
    return value


def _as_overrides(text: str) -> dict[str, Any]:
    return parse_json_object(text, dict, '{"NAME": {"KEY": VALUE}}')


class _MergeAction(argparse.Action):
    """Merges the value of every flag into those before it; a later value wins."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, merge(vars(namespace).get(self.dest) or {}, values))


_REPEATED = (_MergeAction, argparse._AppendAction)
"""Actions of flags that may be given several times; each adds to those before it."""


def fold_stage_flags(arguments: Sequence[str]) -> list[str]:
    """The command line with all `--stage.NAME.KEY VALUE` (or `=VALUE`) as one `--stage=JSON`.

    Raises:
        ValueError: A flag has no value, names no key, or is given twice.
    """
    others: list[str] = []
    overrides: dict[str, Any] = {}
    rest = iter(arguments)
    given: set[str] = set()
    for argument in rest:
        if not argument.startswith(_STAGE_PREFIX):
            others.append(argument)
            continue
        name, has_value, text = argument.partition("=")
        if name.replace("-", "_") in given:
            raise ValueError(f"{name} is given twice; remove one of them")
        given.add(name.replace("-", "_"))
        if not has_value:
            text = next(rest, _STAGE_PREFIX)
            if text.startswith("--"):
                raise ValueError(f"{name} needs a value")
        overrides = merge(overrides, _parse_stage_flag(name, text))
    return [*others, f"--stage={json.dumps(overrides, default=str)}"] if overrides else others


def _parse_stage_flag(name: str, text: str) -> dict[str, Any]:
    stage, *keys = name.removeprefix(_STAGE_PREFIX).split(".")
    if not stage or not all(keys):
        raise ValueError(f"{name} is incomplete; write --stage.NAME.engine_args.KEY VALUE")
    value: Any = _parse_value(text)
    if len(keys) == 1 and (key := keys[0].replace("-", "_")) in STAGE_KEYS:
        return {stage: {key: value}}
    if keys[:1] and keys[0].replace("-", "_") not in SECTIONS:
        keys.insert(0, "engine_args")
    keys = [key.replace("-", "_") if place < 2 else key for place, key in enumerate(keys)]
    if len(keys) < 2 and not isinstance(value, dict):
        raise ValueError(f"{name} {text}: names no key; write --stage.NAME.engine_args.KEY VALUE")
    for key in reversed(keys):
        value = {key: value}
    return {stage: value}


def _parse_value(text: str) -> Any:
    if _EXPONENT.fullmatch(text):  # YAML reads 1e-3 as a string.
        return float(text)
    try:
        return yaml.load(text, UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not YAML: {' '.join(str(error).split())}") from error


class OmniArgumentParser(FlexibleArgumentParser):
    """Suggests the nearest flag for an unknown one, parses `--stage.*`, and refuses unreadable files and flags that are
    given twice. A flag of the command line wins over the same one in a file."""

    _json_tip = FlexibleArgumentParser._json_tip + HINT  # It ends each kind of help but the shortest.

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--?[\w-]+)", message)
        flags = [flag for action in self._all_actions() for flag in action.option_strings]
        if unknown:
            message += nearest(unknown[1].replace("_", "-"), flags)
        super().error(message)

    def _all_actions(self) -> list[argparse.Action]:
        """The flags of this parser and of its subcommands, whose unknown flags argparse reports in this one."""
        actions = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                actions += [a for parser in action.choices.values() for a in parser._actions]
        return actions

    def parse_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:  # type: ignore[override]
        try:
            # vLLM supports `--config FILE` only.
            words = [word for arg in args for word in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
            self._check_repeated(words)
            return super().parse_args(fold_stage_flags(words), namespace)
        except (ValueError, AssertionError) as error:
            self.error(str(error))

    def _check_repeated(self, words: Sequence[str]) -> None:
        actions = {option: action for action in self._all_actions() for option in action.option_strings}
        given: dict[tuple[str, str], str] = {}
        for name in (word.partition("=")[0] for word in words):
            option, _, key = name.partition(".")  # As --compilation-config.mode.
            action = actions.get(option.replace("_", "-"))
            if action is None or isinstance(action, _REPEATED) or key.endswith("+"):
                continue
            if first := given.get((action.dest, key)):
                both = f"{name} is given twice" if name == first else f"{first} and {name} are one option"
                raise ValueError(f"{both}; remove one of them")
            given[action.dest, key] = name

    def load_config_file(self, file_path: str) -> list[str]:
        try:
            content = yaml.load(Path(file_path).read_text(encoding="utf-8"), UniqueKeyLoader)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--config {file_path}: cannot be read: {error}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"--config {file_path}: is not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise ValueError(f"--config {file_path}: must be a mapping of flags to values")
        keys = [str(key).replace("_", "-") for key in content]
        if repeated := next((key for key in keys if keys.count(key) > 1), None):
            raise ValueError(f"--config {file_path}: the key {repeated!r} is given twice; remove one of them")
        dotted = [key for key in content if str(key).startswith("stage.")]
        if dotted:
            raise ValueError(
                f"--config {file_path}: {dotted[0]}: write it as a mapping: stage: {{NAME: {{KEY: VALUE}}}}"
            )
        # vLLM warns of flags that are given twice; on the command line this flag is --stage, which wins.
        return ["--stage-overrides" if word == "--stage" else word for word in super().load_config_file(file_path)]


@dataclass(frozen=True)
class ParsedCommand:
    """A command line.

    Attributes:
        args: The values of all flags.
        explicit: The flags that were given, on the command line or in a `--config` file.
        plain: The same, as values that can be sent to another process: vLLM's parser makes objects of some.
        defaults: The default values of all flags.
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
        parser.parse_args(line)  # Exits here, because help shows the defaults, which are removed below.
    defaults = vars(parser.parse_args([command.name]))
    words: dict[str, str] = {}
    for action in subparser._actions:
        action.default = argparse.SUPPRESS
        if action.type is not None:
            action.type = _remember_word(action.type, action.dest, words)
    explicit = vars(parser.parse_args(line))
    explicit.pop("subparser")
    plain = {n: value if _is_plain(value) else _as_plain(value, words[n]) for n, value in explicit.items()}
    return ParsedCommand(argparse.Namespace(**(defaults | explicit)), explicit, plain, defaults)


def _remember_word(parse: Any, name: str, words: dict[str, str]) -> Callable[[str], Any]:
    """The parser of a flag, which also records the word that it parses."""

    @functools.wraps(parse)
    def remember(word: str) -> Any:
        words[name] = word
        return parse(word)

    return remember


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or type(value) in (str, int, float, bool)


def _as_plain(value: Any, word: str) -> Any:
    """The word that one of vLLM's objects was parsed from: JSON, or a name."""
    if isinstance(value, int):  # a level, as an enum
        return int(value)
    return json.loads(word) if word.startswith("{") else word
