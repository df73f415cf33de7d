# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni config show MODEL`: the resolved stage configuration, as YAML with the source of each value.

The YAML is an equivalent stage configuration; values that are computed from it are comments. Starts nothing, loads no
weights.
"""

import argparse
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from vllm.exceptions import VLLMClientError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.overrides import STAGE_KEYS, overridden_keys
from vllm_omni.config.stage import StageKind
from vllm_omni.config.stage_config import OmniStageConfig, find_stage
from vllm_omni.config.utils import as_plain
from vllm_omni.engine.engine_args import create_config_for_inputs, message_of
from vllm_omni.entrypoints.cli.serve import OmniServeCommand, make_omni_args, set_up_logging
from vllm_omni.entrypoints.cli.serve_help import CONFIG_DESCRIPTION, CONFIG_USAGE
from vllm_omni.entrypoints.request_builder import make_sampling_params
from vllm_omni.entrypoints.resolve import ResolvedPipeline, resolve_pipeline
from vllm_omni.errors import StageConfigError
from vllm_omni.kinds.parameters import load_function_parameters
from vllm_omni.placement.cores import place_cores
from vllm_omni.placement.devices import stage_devices

_MAX_WIDTH = 70
KeyPath = tuple[str | int, ...]
"""Keys from the top to a value. A stage's key is its id: `("stage_args", 0, "runtime", "devices")`."""

_SECTIONS = (
    *("runtime", "engine_args", "default_sampling_params", "input_connectors", "output_connectors"),  # of a stage
    *("defaults", "ar", "restart", "connectors"),  # of the pipeline
)
DEFAULT = "default"
# Engine arguments whose value in the file is not what runs.
_COMPUTED = {"model": "found in the checkpoint", "max_model_len": "reduced to what the checkpoint has"}


@dataclass(frozen=True)
class ConfigValue:
    """One value.

    Attributes:
        path: Where it belongs; ends with its key.
        value: Only types that YAML and JSON have.
        source: Where it came from.
        is_computed: It follows from other values and is not part of a stage configuration.
    """

    path: KeyPath
    value: Any
    source: str
    is_computed: bool = False


class ConfigValues:
    """The values of one pipeline."""

    def __init__(self, resolved: ResolvedPipeline, args: OmniArgs) -> None:
        self._resolved = resolved
        self._args = args
        self._file = resolved.source.name if resolved.source is not None else ""
        self._lines = {} if resolved.source is None else locate_values(resolved.source)
        self._overridden = {
            (find_stage(resolved.loaded, key).stage_id, *pair)
            for key, override in args.stage_overrides.items()
            for pair in overridden_keys(override)
        }

    def __iter__(self) -> Iterator[ConfigValue]:
        """Iterates in the order of a stage configuration."""
        for stage in self._resolved.with_arguments.stage_args:
            for name, value in _fields(stage):
                yield from self._of_key(("stage_args", stage.stage_id, name), value)
                if name == "runtime":
                    if (python := stage.kind.describe_python()) is not None:
                        path = ("stage_args", stage.stage_id, name, "runs in")
                        yield ConfigValue(path, python, "computed", is_computed=True)
                    yield from self._placements(stage)
                if name == "engine_args":
                    yield from self._computed(self._resolved.config.stages[stage.stage_id], stage)
        for name, value in _fields(self._resolved.with_arguments.runtime):
            yield from self._of_key(("runtime", name), value)

    def _of_key(self, path: KeyPath, value: Any) -> Iterator[ConfigValue]:
        """The values below a key of a stage or of `runtime`: several if it is a section."""
        items: list[tuple[Any, Any]]
        if path[-1] in _SECTIONS:
            items = list(value.items()) if isinstance(value, dict) else _fields(value)
        elif path[-1] == "edges":
            items = list(enumerate(value))
        elif value is None or value == [] or value == {}:
            return
        else:
            yield ConfigValue(path, as_plain(value), self._source(path))
            return
        for key, item in items:
            if item is not None or path[-1] == "engine_args":
                yield ConfigValue((*path, key), as_plain(item), self._source((*path, key)))

    def _source(self, path: KeyPath) -> str:
        name = str(path[-1])
        if path[0] == "runtime" and len(path) == 2 and name in self._args.runtime_overrides:
            return _flag(name)
        if path[0] == "stage_args" and name in STAGE_KEYS and (path[1], "engine_args", name) in self._overridden:
            return f"command line: --stage.{self._resolved.loaded.stages[int(path[1])].name}.{name}"
        if path[0] == "stage_args" and len(path) == 4:
            if (path[1], path[2], name) in self._overridden:
                stage = self._resolved.loaded.stages[int(path[1])].name
                return f"command line: --stage.{stage}.{path[2]}.{name}"
            if path[2] == "engine_args" and name in self._args.engine_args:
                return _flag(name)
        if path in self._lines:
            return f"{self._file}:{self._lines[path]}"
        if name == "final_output_type":
            return f"checkpoint: {self._only_kind.checkpoint_file}"
        if path[0] == "stage_args" and path[2] == "engine_args":
            return "vllm_omni"
        is_inferred = self._resolved.source is None and name in ("stage_id", "engine_type", "final_output")
        return f"checkpoint: is {self._only_kind.checkpoint_is}" if is_inferred else DEFAULT

    @property
    def _only_kind(self) -> StageKind:
        """The kind of the stage of a pipeline without a file."""
        return self._resolved.loaded.stage_args[0].kind

    def _placements(self, stage: OmniStageConfig) -> Iterator[ConfigValue]:
        """Where the replicas of a stage with several will be, and its threads."""
        config = self._resolved.config
        cores, devices = place_cores(config, self._args.model), stage_devices(config)
        path = ("stage_args", stage.stage_id, "runtime")
        for replica in config.replicas[stage.stage_id]:
            found = cores[replica.instance_id]
            where = {
                "devices": ",".join(devices[replica.instance_id]),
                "cpus": found.cpus,
                "threads": found.threads,
            }
            shown = {key: value for key, value in where.items() if value}
            if stage.runtime.replicas > 1:
                yield ConfigValue((*path, replica.name), shown, "computed", is_computed=True)
            elif found.threads is not None:
                yield ConfigValue((*path, "threads"), found.threads, "computed", is_computed=True)

    def _computed(self, stage: OmniStageConfig, before: OmniStageConfig) -> Iterator[ConfigValue]:
        """The other arguments of a stage's engine."""
        path = ("stage_args", stage.stage_id, "engine_args")
        for name, value in stage.engine_args.items():
            if value != before.engine_args.get(name):
                yield ConfigValue(
                    (*path, name), value, _COMPUTED.get(name, "computed: runtime.memory"), is_computed=True
                )
        for name, value, source in stage.kind.computed_arguments(self._args.model):
            if name not in stage.engine_args:
                yield ConfigValue((*path, name), value, source, is_computed=True)


class ConfigCommand(OmniServeCommand):
    """Has the flags of `serve`, so that a command line can be inspected before it runs."""

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
        parser = super().subparser_init(subparsers)
        parser.usage, parser.description = CONFIG_USAGE, CONFIG_DESCRIPTION
        group = next(group for group in parser._action_groups if group.title == "Omni")
        group.add_argument("--json", action="store_true", help="Print JSON: each value with its source.")
        return parser

    def run(self, arguments: list[str]) -> None:
        """Prints the configuration; `arguments` are the words after `config show`.

        Raises:
            UsageError: The command line is wrong.
            StageConfigError: The configuration or an argument is wrong.
        """
        parsed = self.parse(arguments)
        set_up_logging(parsed)
        args = make_omni_args(parsed)
        resolved = resolve_pipeline(args)
        _check_values(resolved, args.model)
        values = list(ConfigValues(resolved, args))
        if parsed.args.json:
            print(json.dumps(_as_json(args, resolved, values), indent=2))
        else:
            print(_as_yaml(args, resolved, values))


def _check_values(resolved: ResolvedPipeline, model: str) -> None:
    """Refuses the values that the start refuses when it makes engines and requests.

    Raises:
        StageConfigError: A value is wrong.
    """
    load_function_parameters(resolved.config)
    logging.disable(logging.WARNING)  # vLLM's are about a start.
    try:
        for args in resolved.engine_args:
            create_config_for_inputs(args)
    finally:
        logging.disable(logging.NOTSET)
    for stage in resolved.config.stage_args:
        stage.kind.make_diffusion_processor(model)
        if stage.kind.params == "sampling":
            try:
                make_sampling_params(stage.kind.sampling_values(stage.default_sampling_params))
            except (ValueError, TypeError, VLLMClientError) as error:
                raise StageConfigError(f"{stage.label}: default_sampling_params: {message_of(error)}") from error


def _as_yaml(args: OmniArgs, resolved: ResolvedPipeline, values: Iterable[ConfigValue]) -> str:
    """The configuration with aligned comments."""
    kind = resolved.loaded.stage_args[0].kind
    source = f"one, for {kind.checkpoint_is}" if resolved.source is None else str(resolved.source)
    rows = [(f"# model: {args.model}", ""), (f"# stages: {source}", "")]
    open_path: KeyPath = ()
    for value in values:
        rows += [(heading, "") for heading in _headings(open_path, value.path)]
        open_path = value.path[:-1]
        rows.append((_line(value), value.source))
    width = min(max(len(text) for text, source in rows if source), _MAX_WIDTH)
    return "\n".join(f"{text:<{width}}  # {source}" if source else text for text, source in rows)


def _headings(before: KeyPath, path: KeyPath) -> list[str]:
    """The keys of the mappings that start with a value. A list item starts with a stage's first key, not with a key."""
    parents = path[:-1]
    common = next(
        (i for i, (a, b) in enumerate(zip(before, parents, strict=False)) if a != b), min(len(before), len(parents))
    )
    return [
        f"{_indent(parents[: i + 1])}{parents[i]}:" for i in range(common, len(parents)) if isinstance(parents[i], str)
    ]


def _line(value: ConfigValue) -> str:
    text = yaml.safe_dump(value.value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    indent, key = _indent(value.path), value.path[-1]
    if key == "stage_id":
        indent = indent[:-2] + "- "
    if isinstance(key, int):
        return f"{indent}- {text}"
    return f"{indent}{'# ' if value.is_computed else ''}{key}: {text}"


def _indent(path: KeyPath) -> str:
    """Two spaces for each mapping around a key; a list item counts as two."""
    return "  " * (len(path) - 1)


def _as_json(args: OmniArgs, resolved: ResolvedPipeline, values: Iterable[ConfigValue]) -> dict[str, Any]:
    stages: dict[int, dict[str, Any]] = {stage.stage_id: {} for stage in resolved.config.stage_args}
    runtime: dict[str, Any] = {}
    for value in values:
        is_of_stage = value.path[0] == "stage_args"
        node = stages[int(value.path[1])] if is_of_stage else runtime
        *parents, key = value.path[2 if is_of_stage else 1 :]
        for parent in parents:
            node = node.setdefault(str(parent), {})
        node[str(key)] = {"value": value.value, "source": value.source}
    source = None if resolved.source is None else str(resolved.source)
    return {"model": args.model, "source": source, "stage_args": list(stages.values()), "runtime": runtime}


def locate_values(path: str | Path) -> dict[KeyPath, int]:
    """The line, from 1, of every value and of every mapping and list in a valid stage configuration file."""
    root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    return {} if root is None else dict(_walk(root, ()))


def _walk(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if path:
        yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _walk(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, (*path, _stage_id(item) if path == ("stage_args",) else index))


def _stage_id(stage: yaml.MappingNode) -> int:
    return next(int(value.value) for key, value in stage.value if key.value == "stage_id")


def _fields(struct: msgspec.Struct) -> list[tuple[str, Any]]:
    return [(field.encode_name, getattr(struct, field.name)) for field in msgspec.structs.fields(struct)]


def _flag(name: str) -> str:
    return f"command line: --{name.replace('_', '-')}"
