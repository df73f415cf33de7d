# SPDX-License-Identifier: Apache-2.0
"""Loads and checks a stage configuration file. Every error names the file, the key and the remedy."""

import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from vllm_omni.config.checkpoint_rules import check_checkpoint_config
from vllm_omni.config.resources import check_resources
from vllm_omni.config.stage import STAGE_TYPES, OmniStageConfig
from vllm_omni.config.stage_config import (
    NIXL,
    SENTENCES,
    SHM_THRESHOLD,
    PipelineConfig,
    RuntimeConfig,
    WindowConfig,
)
from vllm_omni.config.utils import convert_config, given_value, nearest, split_error
from vllm_omni.errors import StageConfigError
from vllm_omni.extras import install_command

_READABLE = ("prompt", "prompt_token_ids", "completions", "tensors", "data")


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML's own loader keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    problem = f"the key {key.value!r} is given twice; remove one of them"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


_BASES = {
    "custom_process_input_func": ("StageInputProcessor", "window"),
    "custom_prompt_func": ("PromptProcessor", "settings"),
}
"""By key: the base class, which is above this package, and an attribute of it."""


def load_pipeline_config(path: str | Path, untrusted_checkpoint: Path | None = None) -> PipelineConfig:
    """Loads a stage configuration.

    Args:
        untrusted_checkpoint: The checkpoint that the file is part of, if whoever serves it does not trust its code: the
            file may then set what `checkpoint_rules` allows, and nothing that it names is imported before that is
            checked.

    Raises:
        StageConfigError: The file is missing or not YAML, has an unknown key, a value of a wrong type, an unknown
            stage, a cycle, a dotted path that cannot be imported, or what an untrusted checkpoint may not set.
    """
    path = Path(path)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except OSError as error:
        raise StageConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise StageConfigError(f"{path}: is not UTF-8 (byte {error.start}); save it in this encoding") from error
    except yaml.YAMLError as error:
        raise StageConfigError(f"{path}: is not YAML: {error}") from error
    except RecursionError as error:
        raise StageConfigError(f"{path}: is nested too deeply") from error
    return parse_pipeline_config(raw, str(path), untrusted_checkpoint)


def parse_pipeline_config(raw: Any, source: str, untrusted_checkpoint: Path | None = None) -> PipelineConfig:
    """Parses a configuration from `source` (for messages). Raises as `load_pipeline_config`."""
    if not isinstance(raw, Mapping):
        raise StageConfigError(f"{source}: must be a mapping with the key 'stage_args'")
    try:
        config = convert_config(raw, PipelineConfig)
    except msgspec.ValidationError as error:
        raise StageConfigError(f"{source}: {_explain(error, raw)}") from error
    for index, stage in enumerate(config.stage_args):
        location = f"stage_args[{index}]"
        try:
            stage.kind  # noqa: B018 (chosen here)
        except StageConfigError as error:
            raise StageConfigError(f"{source}: {_stage_name(location, raw)}{location}.{error}") from error
    config = config.with_stage_args(sorted(config.stage_args, key=lambda stage: stage.stage_id))
    try:
        if untrusted_checkpoint is not None:
            check_checkpoint_config(config, untrusted_checkpoint)
        _check_ids(config)
        _check_graph(config)
        for stage in config.stage_args:
            _check_stage(stage)
            _check_input(config, stage)
        _check_runtime(config)
        check_resources(config)
    except StageConfigError as error:
        raise StageConfigError(f"{source}: {error}") from error
    return config


def resolve_dotted_path(path: str, key: str) -> Any:
    """The object at `package.module.name`.

    Raises:
        StageConfigError: A part of the path does not exist; names it, and similar names.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise StageConfigError(f"{key}: {path!r} is not a dotted path; write package.module.name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise StageConfigError(
            f"{key}: {path!r} cannot be imported: {error}; check the spelling, and that the package is installed"
        ) from error
    if not hasattr(module, name):
        raise StageConfigError(f"{key}: {module_name!r} has no {name!r}{nearest(name, dir(module))}")
    return getattr(module, name)


def input_processor_class(stage: OmniStageConfig) -> Any:
    """The `StageInputProcessor` of a stage, a class; None: it has none."""
    path = stage.custom_process_input_func
    return None if path is None else resolve_dotted_path(path, "custom_process_input_func")


def _explain(error: msgspec.ValidationError, raw: Any) -> str:
    """The message for an error of msgspec's, with stage, key, value and remedy."""
    problem, location = split_error(error)
    unknown = re.search(r"unknown field `(.+?)`", problem)
    if unknown is None:
        details = f"{problem}{given_value(error, raw)}{_choices(location)}"
        return f"{_stage_name(location, raw)}{location or 'top level'}: {details}"
    known = [field.encode_name for field in _type_at(location).fields]
    key = f"{location}.{unknown.group(1)}" if location else unknown.group(1)
    return f"unknown key {key!r}{nearest(unknown.group(1), known)} (known here: {', '.join(known)})"


def _stage_name(location: str, raw: Any) -> str:
    """`stage 'thinker': `, of a location in a stage that has a name."""
    try:
        name = raw["stage_args"][int(re.findall(r"^stage_args\[(\d+)]", location)[0])]["engine_args"]["model_stage"]
    except (LookupError, TypeError):
        return ""
    return f"stage {name!r}: "


def _choices(location: str) -> str:
    """` (known here: all, control)`, of a value that is one of several."""
    kind = _type_at(location)
    kinds = [kind, *getattr(kind, "types", ())]
    values = [value for each in kinds if isinstance(each, msgspec.inspect.LiteralType) for value in each.values]
    return f" (known here: {', '.join(map(str, values))})" if values else ""


def _type_at(location: str) -> Any:
    node: Any = msgspec.inspect.type_info(PipelineConfig)
    for part in re.findall(r"\w+|\[[^]]*\]", location):
        node = _descend(node, part)
    return node


def _descend(node: Any, part: str) -> Any:
    if isinstance(node, msgspec.inspect.StructType):
        return next(field.type for field in node.fields if field.encode_name == part)
    if isinstance(node, msgspec.inspect.ListType):
        return node.item_type
    return node.value_type


def _check_ids(config: PipelineConfig) -> None:
    if not config.stage_args:
        raise StageConfigError("stage_args: is empty; a pipeline needs at least one stage")
    seen: set[int | str] = set()
    for stage in config.stage_args:
        if not isinstance(stage.name, str):
            raise StageConfigError(
                f"stage {stage.stage_id}: engine_args.model_stage: {stage.name!r} is not a name; write it in quotes"
            )
        for value, what in ((stage.stage_id, "stage_id"), (stage.name, "engine_args.model_stage")):
            if value in seen:
                raise StageConfigError(f"stage_args: {what} {value!r} is given twice; it must be unique")
            seen.add(value)
    if not any(stage.final_output for stage in config.stage_args):
        raise StageConfigError("stage_args: no stage has final_output: true; callers would receive nothing")


def _check_stage(stage: OmniStageConfig) -> None:
    where = stage.label
    if stage.stage_type and stage.kind.name not in STAGE_TYPES[stage.stage_type]:
        raise StageConfigError(f"{where}: stage_type {stage.stage_type!r} contradicts engine_type; remove one of them")
    if stage.final_output and not stage.final_output_type:
        raise StageConfigError(f"{where}: final_output needs final_output_type, e.g. text or audio")
    if stage.runtime.requires_multimodal_data and stage.engine_input_source and not stage.kind.reads_media:
        raise StageConfigError(
            f"{where}: runtime.requires_multimodal_data: only first stages and diffusion stages receive multimodal data"
        )
    if not stage.kind.has_function and (stage.function or stage.batch_function):
        raise StageConfigError(f"{where}: engine_type {stage.kind.name} has no function; remove one of them")
    if stage.runtime.has_own_python and not stage.kind.has_function:
        raise StageConfigError(
            f"{where}: runtime.python and runtime.packages are for stages with a function, which {stage.kind.name} is "
            "not; remove them"
        )
    if stage.accepts and not stage.kind.accepts_input:
        raise StageConfigError(
            f"{where}: accepts is for stages with a function and at most one source, and accepts: audio also for AR "
            "stages without sources; remove it"
        )
    stage.kind.check()
    for name in stage.reads or ():
        if name.partition(".")[0] not in _READABLE:
            raise StageConfigError(f"{where}: reads: {name!r} is not one of {', '.join(_READABLE)}, or an entry of one")
    if stage.custom_prompt_func and not stage.kind.reads_prompts:
        raise StageConfigError(f"{where}: custom_prompt_func is for vLLM stages that read the prompt; remove it")
    for key in ("custom_process_input_func", "custom_prompt_func", "function", "batch_function"):
        if path := getattr(stage, key):
            _check_code(key, resolve_dotted_path(path, f"{where}: {key}"), f"{where}: {key}: {path}")


def _check_code(key: str, found: Any, where: str) -> None:
    if key not in _BASES:
        if not callable(found):
            raise StageConfigError(f"{where} is no function and no class")
        return
    base, attribute = _BASES[key]
    if not isinstance(found, type) or not hasattr(found, attribute):
        raise StageConfigError(f"{where} is no class that extends {base}")


def _check_input(config: PipelineConfig, stage: OmniStageConfig) -> None:
    sources = [config.stages[source] for source in stage.engine_input_source]
    if stage.accepts and not config.output_types_from(stage.stage_id):
        raise StageConfigError(f"{stage.label}: accepts: no output for callers follows; set final_output of a stage")
    if stage.kind.needs_input_processor(sources) and not stage.custom_process_input_func:
        raise StageConfigError(
            f"{stage.label}: custom_process_input_func is missing; it converts the sources' outputs to input"
        )


def _check_graph(config: PipelineConfig) -> None:
    for stage in config.stage_args:
        for source in stage.engine_input_source:
            if stage.engine_input_source.count(source) > 1:
                raise StageConfigError(f"{stage.label}: engine_input_source names stage {source} twice; name it once")
            if source not in config.stages:
                known = ", ".join(map(str, config.stages))
                raise StageConfigError(
                    f"{stage.label}: engine_input_source names stage {source}, which does not exist; stages are {known}"
                )
    done: set[int] = set()
    while len(done) < len(config.stages):
        ready = {i for i, s in config.stages.items() if i not in done and set(s.engine_input_source) <= done}
        if not ready:
            cycle = sorted(set(config.stages) - done)
            raise StageConfigError(f"engine_input_source: stages {cycle} form a cycle; remove one of the edges")
        done |= ready


def _check_window(config: PipelineConfig, source: int, stage: OmniStageConfig) -> None:
    where = f"edge {source} -> {stage.stage_id}"
    path, processor = stage.custom_process_input_func, input_processor_class(stage)
    declared = None if processor is None else processor.window
    window = config.window(source, stage.stage_id, declared)
    for name in ("window_size", "first_window_size"):
        size = getattr(window, name)
        if size != -1 and size < 1:
            raise StageConfigError(f"{where}: {name} {size} is neither -1 (the whole result) nor a number of units")
    if window.streams and path is not None and declared is None:
        raise StageConfigError(f"{where}: {path} reads whole results only; remove window_size, or set it to -1")
    units = {"tokens" if declared is None else declared.unit, SENTENCES}
    may_be_tensor = declared is None and not config.stages[source].kind.emits_only_text
    if window.streams and window.unit not in units and not may_be_tensor:
        raise StageConfigError(
            f"{where}: unit {window.unit!r} is not one of {', '.join(sorted(units))}{nearest(window.unit, units)}"
        )
    if window.streams and window.unit == SENTENCES:
        _check_sentences(where, config.stages[source], stage, window, processor)
    elif window.streams and processor is not None and window.first_window_size < processor.min_first_window_size:
        raise StageConfigError(
            f"{where}: first_window_size {window.first_window_size} is too small; {path} needs at least "
            f"{processor.min_first_window_size} {window.unit}"
        )
    for name in ("left_context", "right_context"):
        if (context := getattr(window, name)) < 0:
            raise StageConfigError(f"{where}: {name} {context} is negative")


def _check_sentences(
    where: str, source: OmniStageConfig, stage: OmniStageConfig, window: WindowConfig, processor: Any
) -> None:
    """Refuses an edge whose windows cannot be whole sentences."""
    if not source.kind.gives_text:
        raise StageConfigError(f"{where}: unit {SENTENCES}: {source.label} gives no text; choose another unit")
    if processor is not None and processor.window.unit != SENTENCES:
        path = stage.custom_process_input_func
        raise StageConfigError(f"{where}: unit {SENTENCES}: {path} reads windows of {processor.window.unit}")
    for name in ("left_context", "right_context"):
        if context := getattr(window, name):
            raise StageConfigError(f"{where}: {name} {context}: {SENTENCES} have none; remove it")
    reads = stage.reads if stage.reads is not None or processor is None else processor.reads
    if reads is not None and "completions" not in reads:
        raise StageConfigError(f"{where}: unit {SENTENCES}: {stage.label} does not read completions; add it to reads")


def _check_nixl(where: str, runtime: RuntimeConfig) -> None:
    if importlib.util.find_spec("nixl") is None:
        raise StageConfigError(f"{where}: {NIXL} needs NIXL: {install_command('nixl')}")
    if runtime.encrypt != "control":
        raise StageConfigError(f"{where}: {NIXL} does not encrypt what it sends; use it with runtime.encrypt: control")


def _check_runtime(config: PipelineConfig) -> None:
    runtime = config.runtime
    if not runtime.enabled:
        raise StageConfigError("runtime.enabled: false is not supported; remove the key")
    edges: set[tuple[int, int]] = set()
    for edge in runtime.edges:
        if (edge.source, edge.to) in edges:
            raise StageConfigError(f"runtime.edges: {edge.source} -> {edge.to} is given twice; remove one of them")
        edges.add((edge.source, edge.to))
        if edge.to not in config.stages or edge.source not in config.stages[edge.to].engine_input_source:
            where = f"runtime.edges {edge.source} -> {edge.to}"
            raise StageConfigError(f"{where}: stage {edge.to} does not list {edge.source} in engine_input_source")
    for stage in config.stage_args:
        for source in stage.engine_input_source:
            _check_window(config, source, stage)
    _check_connectors(config)


def _check_connectors(config: PipelineConfig) -> None:
    runtime = config.runtime
    used = set()
    for stage in config.stage_args:
        edges = {f"from_stage_{source}" for source in stage.engine_input_source}
        edges |= {f"to_stage_{target}" for target in config.targets[stage.stage_id]}
        for edge, name in (*stage.input_connectors.items(), *stage.output_connectors.items()):
            if edge not in edges:
                known = ", ".join(sorted(edges)) or "none"
                raise StageConfigError(f"{stage.label}: there is no edge {edge!r}; the stage has {known}")
            if name not in runtime.connectors:
                raise StageConfigError(
                    f"{stage.label}: connector {name!r} is not defined under "
                    f"runtime.connectors{nearest(name, runtime.connectors)}"
                )
            used.add(name)
    for name, connector in runtime.connectors.items():
        where = f"runtime.connectors.{name}"
        keys = () if connector.name == "InlineConnector" else (SHM_THRESHOLD,)
        for key in connector.extra:
            if key not in keys:
                raise StageConfigError(f"{where}: extra: {connector.name} has no {key!r}{nearest(key, keys)}")
        if name not in used:
            raise StageConfigError(
                f"{where}: no edge uses it; name it in input_connectors or output_connectors of a stage, or remove it"
            )
        if connector.name == NIXL:
            _check_nixl(where, runtime)
