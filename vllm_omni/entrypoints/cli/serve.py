# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL --omni`: vLLM's command with our flags, turned into a pipeline and its server.

It knows which flags are whose. What a pipeline does with its arguments is `AsyncOmniLLM`'s business, what the server
does with its own is that of `entrypoints.openai`.
"""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.exceptions import VLLMClientError
from vllm.logger import configure_logging_from_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.entrypoints.cli import no_effect
from vllm_omni.entrypoints.cli.arguments import add_diffusion_flags, add_pipeline_flags, base_options
from vllm_omni.entrypoints.cli.parser import ParsedCommand, UsageError, parse_command
from vllm_omni.entrypoints.openai.server_args import add_api_arguments, add_limit_arguments, check_limits
from vllm_omni.entrypoints.openai.voices import Voices
from vllm_omni.entrypoints.request_builder import list_voices, load_processors
from vllm_omni.entrypoints.resolve import has_vllm_stages
from vllm_omni.orchestrator.fork_server import ForkServer

DESCRIPTION = """Serve a model as a pipeline of stages, each an engine in its own process, with vLLM's
OpenAI-compatible server. All flags of `vllm serve` that mean something to a pipeline are taken. Engine
flags that are given reach every stage that has such an argument, and win over the stage configuration;
those that are not given are as the stage configuration says.

Search by using: `--help=omni` for the pipeline, `--help=omnilimits` for what requests may send and the server keeps,
`--help=omnidiffusion` for image, video and sound stages, `--help=Frontend` for vLLM's server.
  Use `--help=all` to show all available flags at once.
"""

# Engine arguments that are the server's here, or the whole pipeline's.
_NOT_FOR_STAGES = {
    "lora_modules",
    "model",
    "enable_log_requests",
    "disable_log_stats",
    "shutdown_timeout",
    "log_level",
    "log_config_file",
}
# The server reads these of a vLLM stage's configuration where there is one, and of its own flags where there is none.
_ALSO_THE_SERVERS = {"served_model_name", "allowed_local_media_path", "allowed_media_domains", "logging_config"}


class OmniServeCommand(ServeSubcommand):
    """vLLM's `serve` for pipelines."""

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
        parser = super().subparser_init(subparsers)
        parser.usage = "vllm serve MODEL --omni [options]"
        parser.description = DESCRIPTION
        taken = {action.dest for action in parser._actions}
        add_pipeline_flags(parser.add_argument_group("Omni", "The pipeline: its stages, times, limits and traces."))
        api = parser.add_argument_group("OmniAPI", "OpenAI's API: default outputs of chat, and names of voices.")
        add_api_arguments(api)
        limits = parser.add_argument_group("OmniLimits", "What requests may send, and what the server keeps.")
        add_limit_arguments(limits)
        diffusion = parser.add_argument_group(
            "OmniDiffusion", "Diffusion stages: how they are loaded and run, and what a request may ask."
        )
        add_diffusion_flags(diffusion, taken)
        return parser

    def parse(self, arguments: list[str]) -> ParsedCommand:
        """Parses and checks what stands after `serve`; exits with 2 where it cannot be used."""
        parsed = parse_command(self, arguments, "vllm-omni")
        try:
            _check(parsed)
            self.validate(parsed.args)
        except (UsageError, VLLMClientError, ValueError, TypeError, KeyError, OSError) as error:
            # vLLM's checks raise these; str() of a KeyError has quotes around it.
            raise UsageError(
                str(error.args[0] if isinstance(error, KeyError) else error).removeprefix("Error: ")
            ) from error
        return parsed

    def validate(self, args: argparse.Namespace) -> None:
        super().validate(args)
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        validate_api_server_args(args)
        check_limits(args)

    def serve(self, arguments: list[str], fork_server: ForkServer | None) -> None:
        """Serves until a signal ends it.

        Args:
            fork_server: Where stages shall be forked from; None: one that is started when the flags are known.

        Raises:
            UsageError: The command line cannot be used.
            OmniError: The pipeline's configuration is wrong, or it failed to start.
            OSError: The port is taken.
        """
        parsed = self.parse(arguments)
        set_up_logging(parsed)
        if parsed.args.voice_map:
            _check_voice_map(parsed)
        from vllm_omni.entrypoints.openai.api_server import run

        run(parsed.args, make_llm_args(parsed), fork_server)


def _check(parsed: ParsedCommand) -> None:
    args = parsed.args
    model = args.model_tag or parsed.explicit.get("model")
    if not model:
        raise UsageError("the model is missing; write: vllm serve MODEL --omni")
    args.model = model
    ignored = [
        f"--{name.replace('_', '-')} has no effect: {why}"
        for name, why in no_effect.find_ignored(parsed.explicit, parsed.defaults)
    ]
    if ignored:
        raise UsageError("\n".join(ignored))
    args.api_server_count = None
    # vLLM's engine would do this; the server reads it there.
    said = {
        name: parsed.explicit[name]
        for name in ("reasoning_parser", "reasoning_parser_plugin")
        if name in parsed.explicit
    }
    args.structured_outputs_config = dataclasses.replace(args.structured_outputs_config, **said)


def _check_voice_map(parsed: ParsedCommand) -> None:
    """Before the stages start, which can take minutes."""
    from vllm_omni.entrypoints.cli.config import resolve_command  # which imports this module

    config = resolve_command(parsed)[0].config
    try:
        Voices(list_voices(load_processors(config, parsed.args.model)), parsed.args.voice_map)
    except ValueError as error:
        raise UsageError(f"--voice-map: {error}") from error


def make_llm_args(parsed: ParsedCommand) -> dict[str, Any]:
    """The arguments of `AsyncOmniLLM`: nothing that the user did not give, but the model and `log_stats`.

    Raises:
        StageConfigError: There is no such checkpoint, or its stage configuration is wrong.
    """
    explicit = parsed.explicit
    options = {name: explicit[name] for name in base_options() if name in explicit}
    engine_args = engine_arguments(parsed.plain)
    given = {name for name in _ALSO_THE_SERVERS if name in engine_args}
    adapters = {module.name: module.path for module in parsed.args.lora_modules or ()}
    if (given or adapters) and not has_vllm_stages(parsed.args.model, parsed.args.stage_configs_path, engine_args):
        engine_args = {name: value for name, value in engine_args.items() if name not in given}
        if adapters:  # vLLM's handlers load those of a vLLM stage.
            engine_args["lora_modules"] = adapters
    return {
        "model": parsed.args.model,
        "log_stats": not parsed.args.disable_log_stats,
        "stage_overrides": parsed.args.stage_overrides,
        **options,
        **engine_args,
    }


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the flags that were given which are arguments of engines."""
    known = {field.name for field in dataclasses.fields(EngineArgs)} | set(DiTConfig.__struct_fields__)
    return {name: value for name, value in given.items() if name in known - _NOT_FOR_STAGES - no_effect.NAMES}


def set_up_logging(parsed: ParsedCommand) -> None:
    """For this process, and through the environment for those of the stages, which begin before they get arguments."""
    config = configure_logging_from_args(parsed.args)
    os.environ["VLLM_LOGGING_LEVEL"] = config.log_level
    if config.pylogging_config_file:
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = config.pylogging_config_file
