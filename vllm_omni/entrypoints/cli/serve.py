# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL --omni`: vLLM's command with our flags, which starts a pipeline and its server."""

import argparse
import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.exceptions import VLLMClientError
from vllm.logger import configure_logging_from_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config.dit_config import DIT_SETTINGS
from vllm_omni.config.omni_args import OmniArgs, PipelineOptions
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.cli import unsupported_flags
from vllm_omni.entrypoints.cli.arguments import ParsedCommand, add_diffusion_flags, add_pipeline_flags, parse_command
from vllm_omni.entrypoints.cli.serve_help import DESCRIPTION, GROUPS, HINT, SERVE_USAGE
from vllm_omni.entrypoints.cli_args import byte_size
from vllm_omni.entrypoints.openai.middleware import api_keys
from vllm_omni.entrypoints.openai.server_args import add_api_arguments, add_limit_arguments, check_limits
from vllm_omni.entrypoints.openai.voices import Voices
from vllm_omni.entrypoints.request_builder import list_voices, load_processors
from vllm_omni.entrypoints.resolve import has_vllm_stages, resolve_pipeline
from vllm_omni.entrypoints.root_path import as_root_path
from vllm_omni.errors import UsageError
from vllm_omni.extras import install_command
from vllm_omni.kinds.parameters import load_function_parameters
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.metrics.logs import log_loudly, log_quietly
from vllm_omni.model_executor.prompt_processor import load_prompt_processors
from vllm_omni.model_packages import find_models

OPTIONS = {field.name for field in dataclasses.fields(PipelineOptions)}
# Engine arguments that apply to the server here, or to the whole pipeline.
_NOT_FOR_STAGES = {
    "lora_modules",
    "model",
    "enable_log_requests",
    "disable_log_stats",
    "shutdown_timeout",
    "log_level",
    "log_config_file",
}
_FOR_STAGES = {field.name for field in dataclasses.fields(EngineArgs)} | set(DIT_SETTINGS)
_FOR_STAGES -= _NOT_FOR_STAGES | unsupported_flags.NAMES
# The server reads these from the configuration of a vLLM stage; without vLLM stages, from its own flags.
_SHARED_WITH_SERVER = {"served_model_name", "allowed_local_media_path", "allowed_media_domains", "logging_config"}


class OmniServeCommand(ServeSubcommand):
    """vLLM's `serve` for pipelines."""

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
        parser = super().subparser_init(subparsers)
        parser.usage, parser.description, parser.epilog = SERVE_USAGE, DESCRIPTION, HINT
        for action in parser._actions:
            if action.dest.endswith("_bytes"):
                action.type = byte_size
        vllm_flags = {action.dest for action in parser._actions}
        groups = {title: parser.add_argument_group(title, about) for title, about in GROUPS.items()}
        add_pipeline_flags(groups["Omni"])
        add_api_arguments(groups["OmniAPI"])
        add_limit_arguments(groups["OmniLimits"])
        add_diffusion_flags(groups["OmniDiffusion"], vllm_flags)
        return parser

    def parse(self, arguments: list[str]) -> ParsedCommand:
        """Parses and checks the words after `serve`; exits with 2 if they are wrong."""
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
            fork_server: The server that stages are forked from; None: a new one, started after the flags are parsed.

        Raises:
            UsageError: The command line is wrong.
            OmniError: The pipeline's configuration is wrong, or it failed to start.
            OSError: The port is taken.
        """
        parsed = self.parse(arguments)
        set_up_logging(parsed)
        if parsed.args.voice_map:
            _check_voice_map(parsed)
        from vllm_omni.entrypoints.openai.server_process import run

        run(parsed.args, make_llm_args(parsed), fork_server)


def _check(parsed: ParsedCommand) -> None:
    args = parsed.args
    args.model = args.model_tag or parsed.explicit.get("model")
    if not args.model:
        raise UsageError(f"the model is missing; write: {SERVE_USAGE}")
    if (folder := find_checkpoint(args.model)) != args.model:
        args.served_model_name = args.served_model_name or [args.model]
        args.model = folder
    unsupported = [
        f"--{name.replace('_', '-')} has no effect: {reason}"
        for name, reason in unsupported_flags.find_unsupported(parsed.explicit, parsed.defaults)
    ]
    if unsupported:
        raise UsageError("\n".join(unsupported))
    if args.api_key_file:
        args.api_key = [*(args.api_key or ()), *_read_api_keys(args.api_key_file)]
    if args.playground:
        _check_playground(args)
    if args.root_path is not None:
        args.root_path = as_root_path(args.root_path)
    args.api_server_count = None
    # The server reads these there; in vLLM the engine sets them.
    names = {"reasoning_parser", "reasoning_parser_plugin"} & parsed.explicit.keys()
    reasoning = {name: parsed.explicit[name] for name in names}
    args.structured_outputs_config = dataclasses.replace(args.structured_outputs_config, **reasoning)


def _read_api_keys(path: str) -> list[str]:
    """The keys of `--api-key-file`. An empty file would leave the server open to all."""
    try:
        keys = [key for line in Path(path).read_text().splitlines() if (key := line.strip())]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not keys:
        raise UsageError(f"--api-key-file {path} has no key; make one: openssl rand -hex 32 > {path}")
    return keys


def _check_playground(args: argparse.Namespace) -> None:
    if "playground" not in find_models().pages:
        raise UsageError(f"--playground: no package has the page\n{find_models().describe_packages()}")
    if not importlib.util.find_spec("gradio"):
        raise UsageError(f"--playground needs Gradio: {install_command('ui')}")
    if args.uds:
        raise UsageError("--playground: browsers cannot reach --uds; run `vllm-omni playground` beside a --port")
    if api_keys(args) and not args.playground_auth:
        raise UsageError(
            "--playground would let everybody use the model without the API key; give --playground-auth NAME:PASSWORD"
        )
    name, _, password = (args.playground_auth or "-:-").partition(":")
    if not (name and password):
        raise UsageError("--playground-auth is not of the form NAME:PASSWORD")


def _check_voice_map(parsed: ParsedCommand) -> None:
    """Checks `--voice-map` before the stages start, which can take minutes."""
    config = resolve_pipeline(make_omni_args(parsed)).config
    try:
        model = parsed.args.model
        processors = load_prompt_processors(config, model), load_processors(config, model)
        names = list_voices(*processors, load_function_parameters(config))
        Voices(names, parsed.args.voice_map)
    except ValueError as error:
        raise UsageError(f"--voice-map: {error}") from error


def make_llm_args(parsed: ParsedCommand) -> dict[str, Any]:
    """The arguments of `AsyncOmniLLM`: the model, `log_stats`, and explicit flags only.

    Raises:
        StageConfigError: There is no such checkpoint, or its stage configuration is wrong.
    """
    args = {
        "model": parsed.args.model,
        "log_stats": not parsed.args.disable_log_stats,
        "stage_overrides": parsed.args.stage_overrides,
        **{name: value for name, value in parsed.explicit.items() if name in OPTIONS},
        **{name: value for name, value in parsed.plain.items() if name in _FOR_STAGES},
    }
    adapters = {module.name: module.path for module in parsed.args.lora_modules or ()}
    if not (adapters or _SHARED_WITH_SERVER & args.keys()) or has_vllm_stages(OmniArgs.from_kwargs(**args)):
        return args
    args = {name: value for name, value in args.items() if name not in _SHARED_WITH_SERVER}
    # vLLM's handlers load the adapters of a vLLM stage; those of a diffusion stage are an engine argument.
    return args | ({"lora_modules": adapters} if adapters else {})


def make_omni_args(parsed: ParsedCommand) -> OmniArgs:
    """The arguments as one object. Raises as `make_llm_args`."""
    return OmniArgs.from_kwargs(**make_llm_args(parsed))


def set_up_logging(parsed: ParsedCommand) -> None:
    """Sets up logging, through the environment also for the stages, which start before they get arguments."""
    if parsed.explicit.keys() & {"log_level", "log_config_file", "logging_config"}:
        log_loudly()
    else:
        log_quietly()
    config = configure_logging_from_args(parsed.args)
    os.environ["VLLM_LOGGING_LEVEL"] = config.log_level
    if config.pylogging_config_file:
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = config.pylogging_config_file
