# SPDX-License-Identifier: Apache-2.0
"""The programs and command lines of the documentation are valid; those of the quickstart are run elsewhere."""

import ast
import json
import re
import shlex

import pytest
import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.docs.pages import Snippet, snippets
from vllm_omni.entrypoints.cli.arguments import fold_stage_flags
from vllm_omni.entrypoints.cli.config import ConfigCommand
from vllm_omni.entrypoints.cli.serve import OmniServeCommand, make_omni_args
from vllm_omni.entrypoints.resolve import read_pipeline
from vllm_omni.model_packages import find_models

PROGRAMS = snippets("python")
SERVE = re.compile(r"^(?:\w+=\S+ )*(?:vllm serve|vllm-omni serve|vllm-omni config show|vllm-omni doctor) (.*)$")


@pytest.mark.parametrize("snippet", PROGRAMS, ids=str)
def test_programs_compile(snippet: Snippet) -> None:
    compile(snippet.text, str(snippet), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=str)
def test_yaml_is_valid(snippet: Snippet) -> None:
    assert all(document is not None for document in yaml.safe_load_all(snippet.text))


def commands() -> list[str]:
    """Command lines that start a server or resolve a pipeline, without their first words."""
    found = []
    for snippet in snippets("bash", "", "console"):
        for line in re.sub(r"\\\n\s*", "", snippet.text).splitlines():
            if match := SERVE.match(line.removeprefix("$ ").strip()):
                found.append(match[1])
    return found


@pytest.fixture(scope="module")
def flags() -> set[str]:
    parser = OmniServeCommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    of_doctor = {"--gpus", "--gpu-memory", "--json"}
    return {flag for action in parser._actions for flag in action.option_strings} | of_doctor


def test_command_lines_have_known_flags(flags: set[str]) -> None:
    lines = commands()
    assert len(lines) > 8
    for line in lines:
        words = [word for word in shlex.split(line, comments=True) if not word.startswith("[")]
        for word in fold_stage_flags(words):
            if word.startswith("--"):
                assert re.split("[=.]", word)[0] in flags, line


def test_commands_that_name_an_installed_model_resolve() -> None:
    split = [[word for word in shlex.split(line, comments=True) if not word.startswith("[")] for line in commands()]
    named = [words for words in split if words[0] in find_models().checkpoints]
    assert len(named) >= 8
    for words in named:
        read_pipeline(make_omni_args(ConfigCommand().parse(words)))


def test_json_of_the_documentation_is_valid() -> None:
    for snippet in snippets("json"):
        json.loads(re.sub(r"\{\.\.\.\}", "{}", snippet.text))
