# SPDX-License-Identifier: Apache-2.0
"""The flags of the server that the documentation names: each reaches what reads it, and none is forgotten here.

The pipeline's own options are in `test_serve.py`, the arguments of engines in `../test_documented_flags.py`.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.docs.pages import PAGES
from vllm_omni.config.dit_config import DIT_SETTINGS
from vllm_omni.config.omni_args import PipelineOptions
from vllm_omni.entrypoints.cli.serve import OmniServeCommand, make_llm_args
from vllm_omni.entrypoints.openai.server_args import RealtimeLimits, RequestLimits, ServerLimits, flag, limits_from

LIMITS: tuple[Any, ...] = (RequestLimits, ServerLimits, RealtimeLimits)
# What the server's namespace has, by name: the words on the command line, and the value.
GIVEN: dict[str, tuple[list[str], Any]] = {
    "allow_credentials": ([], True),
    "allowed_headers": (['["x-a"]'], ["x-a"]),
    "allowed_methods": (['["GET"]'], ["GET"]),
    "allowed_origins": (['["http://a"]'], ["http://a"]),
    "api_key": (["a", "b"], ["a", "b"]),
    "chat_template": (["{{ messages }}"], "{{ messages }}"),
    "default_modalities": (["text"], ["text"]),
    "enable_auto_tool_choice": ([], True),
    "enable_per_request_metrics": ([], True),
    "enable_scale_out": ([], True),
    "host": (["127.0.0.1"], "127.0.0.1"),
    "middleware": (["some.Middleware"], ["some.Middleware"]),
    "model_aliases": ([], False),
    "playground_auth": (["ann:secret"], "ann:secret"),
    "port": (["8123"], 8123),
    "public_lists": ([], True),
    "resumable_streams": ([], True),
    "root_path": (["/v"], "/v"),
    "ssl_certfile": (["c.pem"], "c.pem"),
    "ssl_keyfile": (["k.pem"], "k.pem"),
    "tool_call_parser": (["hermes"], "hermes"),
    "trust_request_chat_template": ([], True),
    "trust_request_mm_kwargs": ([], True),
    "uds": (["/tmp/s"], "/tmp/s"),
}
OF_DIFFUSION: dict[str, Any] = {
    "cache_backend": "first_block_cache",
    "max_pixels": 4096,
    "offload": "model",
}
# Elsewhere: files and mappings of flags, what is refused, and what needs a model of another kind.
IN_TEST_SERVE = {
    "api_key_file",
    "config",
    "grpc",
    "headless",
    "lora_modules",
    "omni",
    "playground",
    "stage_overrides",
    "vae_tiling",
    "voice_map",
}


@pytest.fixture(scope="module")
def documented() -> set[str]:
    parser = OmniServeCommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    names = {word: action.dest for action in parser._actions for word in action.option_strings}
    words = {word for page in PAGES for word in re.findall(r"--[a-z][a-z0-9-]+", page.read_text())}
    return {names[word] for word in words & names.keys()} - {"help", "json"}


def test_every_documented_flag_is_tried(documented: set[str]) -> None:
    of_engines = {field.name for field in dataclasses.fields(EngineArgs)}
    of_pipeline = {field.name for field in dataclasses.fields(PipelineOptions)}
    limits = {field.name for kind in LIMITS for field in dataclasses.fields(kind)}
    tried = GIVEN.keys() | OF_DIFFUSION.keys() | IN_TEST_SERVE
    assert documented - of_engines - of_pipeline - limits == tried


def test_the_server_has_what_is_given(tiny_qwen3: Path) -> None:
    line = [str(tiny_qwen3)]
    for name, (words, value) in GIVEN.items():
        line += [f"--no-{flag(name)[2:]}" if value is False else flag(name), *words]
    args = vars(OmniServeCommand().parse(line).args)
    assert {name: args[name] for name in GIVEN} == {name: value for name, (_, value) in GIVEN.items()}


@pytest.mark.parametrize("kind", LIMITS)
def test_every_limit_has_the_value_of_its_flag(kind: Any, tiny_qwen3: Path, tmp_path: Path) -> None:
    values = {
        field.name: str(tmp_path) if field.name == "video_dir" else (field.default or 1 << 40) + 1
        for field in dataclasses.fields(kind)
    }
    line = [word for name, value in values.items() for word in (flag(name), str(value))]
    assert limits_from(OmniServeCommand().parse([str(tiny_qwen3), *line]).args, kind) == kind(**values)


def test_a_diffusion_stage_has_what_is_given(tiny_diffusion: Any) -> None:
    assert set(DIT_SETTINGS) >= OF_DIFFUSION.keys()
    line = [word for name, value in OF_DIFFUSION.items() for word in (flag(name), str(value))]
    args = make_llm_args(OmniServeCommand().parse([str(tiny_diffusion("z_image")), *line]))
    assert {name: args[name] for name in OF_DIFFUSION} == OF_DIFFUSION
