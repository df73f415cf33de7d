# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni config show MODEL`: the resolved stage configuration, as YAML with the source of each value.

The YAML is a stage configuration that does the same; what follows from it is shown as comments. Starts nothing, loads
no weights.
"""

import argparse
import json
from collections.abc import Iterable
from typing import Any

import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config.provenance import KeyPath
from vllm_omni.entrypoints.cli.config_values import ConfigValue, ConfigValues, Given
from vllm_omni.entrypoints.cli.parser import ParsedCommand, UsageError
from vllm_omni.entrypoints.cli.serve import OmniServeCommand, make_llm_args, set_up_logging
from vllm_omni.entrypoints.pipeline import check_engine_args
from vllm_omni.entrypoints.resolve import ReadPipeline, ResolvedPipeline, read_pipeline, resolve_pipeline

USAGE = "vllm-omni config show MODEL [--json] [the options of vllm serve MODEL --omni]"
_RUNTIME_FLAGS = ("stage_init_timeout", "request_timeout_s", "max_inflight", "max_queued")
_WIDEST = 70


class ConfigCommand(OmniServeCommand):
    """Takes what `serve` takes, so that a command line can be looked at before it is run."""

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
        parser = super().subparser_init(subparsers)
        parser.usage = USAGE
        parser.description = (
            "Print the stage configuration that `vllm serve MODEL --omni` with these options would run."
        )
        group = next(group for group in parser._action_groups if group.title == "Omni")
        group.add_argument("--json", action="store_true", help="Print JSON: for every value what it is and its source.")
        return parser

    def run(self, arguments: list[str]) -> None:
        """Prints it.

        Raises:
            UsageError: The command line cannot be used.
            StageConfigError: The configuration or an argument is wrong.
        """
        if arguments[:1] in (["-h"], ["--help"]):
            print(f"usage: {USAGE}\n\n`vllm-omni config show --help` lists the options.")
            return
        if arguments[:1] != ["show"]:
            raise UsageError(f"config {arguments[0] if arguments else ''}: unknown; write: {USAGE}")
        parsed = self.parse(arguments[1:])
        set_up_logging(parsed)
        resolved, given = resolve_command(parsed)
        values = list(ConfigValues(resolved, parsed.args.model, given))
        if parsed.args.json:
            print(json.dumps(_as_json(parsed.args.model, resolved, values), indent=2))
        else:
            print(as_yaml(parsed.args.model, resolved, values))


def resolve_command(parsed: ParsedCommand) -> tuple[ResolvedPipeline, Given]:
    model, given = parsed.args.model, _given(parsed)
    resolved = resolve_pipeline(model, parsed.args.stage_configs_path, **vars(given))
    check_engine_args(resolved.config, model)
    return resolved, given


def read_command(parsed: ParsedCommand) -> ReadPipeline:
    """The same, for any machine."""
    return read_pipeline(parsed.args.model, parsed.args.stage_configs_path, **vars(_given(parsed)))


def _given(parsed: ParsedCommand) -> Given:
    llm_args = make_llm_args(parsed)
    return Given(
        engine_args={name: value for name, value in llm_args.items() if name not in _not_for_engines()},
        stage_overrides=llm_args["stage_overrides"],
        runtime_overrides={name: llm_args.get(name) for name in _RUNTIME_FLAGS},
    )


def _not_for_engines() -> set[str]:
    from vllm_omni.entrypoints.cli.arguments import base_options

    return {*base_options(), "model", "log_stats", "stage_overrides"}


def as_yaml(model: str, resolved: ResolvedPipeline, values: Iterable[ConfigValue]) -> str:
    """The configuration with aligned comments."""
    rows = [(f"# model: {model}", ""), (f"# stages: {_stages_from(resolved)}", "")]
    open_path: KeyPath = ()
    for value in values:
        rows += _headings(open_path, value.path)
        open_path = value.path[:-1]
        rows.append((_line(value), value.source))
    width = min(max(len(text) for text, source in rows if source), _WIDEST)
    return "\n".join(f"{text:<{width}}  # {source}" if source else text for text, source in rows)


def _stages_from(resolved: ResolvedPipeline) -> str:
    return "one, for a diffusers pipeline" if resolved.source is None else str(resolved.source)


def _headings(before: KeyPath, path: KeyPath) -> list[tuple[str, str]]:
    """The keys of the mappings that a value is the first of. A stage's first key begins its list item."""
    parents = path[:-1]
    common = next(
        (i for i, (a, b) in enumerate(zip(before, parents, strict=False)) if a != b), min(len(before), len(parents))
    )
    return [
        (f"{_indent(parents[: i + 1])}{parents[i]}:", "")
        for i in range(common, len(parents))
        if isinstance(parents[i], str)
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
    """Two spaces for each mapping around a key; a list item stands for two."""
    return "  " * (len(path) - 1)


def _as_json(model: str, resolved: ResolvedPipeline, values: Iterable[ConfigValue]) -> dict[str, Any]:
    stages: dict[int, dict[str, Any]] = {stage.stage_id: {} for stage in resolved.config.stage_args}
    runtime: dict[str, Any] = {}
    for value in values:
        place, rest = (
            (stages[int(value.path[1])], value.path[2:]) if value.path[0] == "stage_args" else (runtime, value.path[1:])
        )
        for key in rest[:-1]:
            place = place.setdefault(str(key), {})
        place[str(rest[-1])] = {"value": value.value, "source": value.source}
    source = None if resolved.source is None else str(resolved.source)
    return {"model": model, "source": source, "stage_args": list(stages.values()), "runtime": runtime}
