# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni config show MODEL`: the resolved stage configuration, as YAML with the source of each value.

The YAML is an equivalent stage configuration; values that are computed from it are comments. Starts nothing, loads no
weights.
"""

import argparse
import json
import logging
from collections.abc import Iterable
from typing import Any

import yaml
from vllm.exceptions import VLLMClientError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.engine.engine_args import create_config_for_inputs, message_of
from vllm_omni.entrypoints.cli.config_values import ConfigValue, ConfigValues, KeyPath
from vllm_omni.entrypoints.cli.serve import OmniServeCommand, make_omni_args, set_up_logging
from vllm_omni.entrypoints.cli.serve_help import CONFIG_DESCRIPTION, CONFIG_USAGE
from vllm_omni.entrypoints.request_builder import make_sampling_params
from vllm_omni.entrypoints.resolve import ResolvedPipeline, resolve_pipeline
from vllm_omni.errors import StageConfigError
from vllm_omni.kinds.parameters import load_function_parameters

_MAX_WIDTH = 70


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
