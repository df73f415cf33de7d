# SPDX-License-Identifier: Apache-2.0
"""Every value of a resolved pipeline with its source. `config.py` prints them."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.overrides import STAGE_KEYS, overridden_keys
from vllm_omni.config.stage_config import OmniStageConfig, find_stage
from vllm_omni.entrypoints.resolve import ResolvedPipeline
from vllm_omni.placement.cores import place_cores
from vllm_omni.placement.devices import stage_devices

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
            yield ConfigValue(path, _plain(value), self._source(path))
            return
        for key, item in items:
            if item is not None or path[-1] == "engine_args":
                yield ConfigValue((*path, key), _plain(item), self._source((*path, key)))

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
            return "checkpoint: model_index.json"
        if path[0] == "stage_args" and path[2] == "engine_args":
            return "vllm_omni"
        is_inferred = self._resolved.source is None and name in ("stage_id", "engine_type", "final_output")
        return "checkpoint: is a diffusers pipeline" if is_inferred else DEFAULT

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
                "threads": found.num_threads,
            }
            shown = {key: value for key, value in where.items() if value}
            if stage.runtime.replicas > 1:
                yield ConfigValue((*path, replica.name), shown, "computed", is_computed=True)
            elif found.num_threads is not None:
                yield ConfigValue((*path, "threads"), found.num_threads, "computed", is_computed=True)

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


def _plain(value: Any) -> Any:
    """A value in YAML's types; of vLLM's configuration objects, the fields that differ from their defaults."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, msgspec.Struct):
        return {key: _plain(item) for key, item in _fields(value) if item is not None}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {field: vars(value).get(field.name) for field in dataclasses.fields(value)}
        return {field.name: _plain(item) for field, item in values.items() if item != _default(field)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _default(field: dataclasses.Field) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()
