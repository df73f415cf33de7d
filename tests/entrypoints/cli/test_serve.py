# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL --omni`: supported flags, what they reach, and errors of others."""

import errno
import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.cli import main as cli
from vllm_omni.entrypoints.cli import unsupported_flags
from vllm_omni.entrypoints.cli.serve import OPTIONS, OmniServeCommand
from vllm_omni.entrypoints.cli.serve_help import GROUPS, HINT, VLLM_GROUPS, serve_page
from vllm_omni.entrypoints.openai import server_process
from vllm_omni.entrypoints.openai.middleware import api_keys
from vllm_omni.errors import StageStartError


class Server:
    """A fake of the server, which records its arguments."""

    args: Namespace
    llm_args: dict[str, Any]

    def run(self, args: Namespace, llm_args: dict[str, Any], fork_server: None) -> None:
        self.args, self.llm_args = args, llm_args


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(server_process, "run", server.run)
    return server


def test_only_explicit_flags_reach_the_stages(run, server: Server, tiny_qwen3: Path) -> None:
    assert run("serve", tiny_qwen3, "--omni").code == 0
    assert server.llm_args == {"model": str(tiny_qwen3), "log_stats": True, "stage_overrides": {}}
    # vLLM's app reads these.
    assert (server.args.model, server.args.port, server.args.gpu_memory_utilization) == (str(tiny_qwen3), 8000, 0.92)


def test_flags_reach_the_server_or_the_stages(run, server: Server, tiny_qwen3: Path) -> None:
    given = [
        "--port",
        "8091",
        "--max-model-len",
        "1k",
        "--dtype",
        "float32",
        "--max-inflight",
        "3",
        "--disable-log-stats",
    ]
    given += ["--served-model-name", "a", "b", "--reasoning-parser", "qwen3", "--shutdown-timeout", "7"]
    given += ["--request-timeout-s", "1.5", "--enable-log-requests", "--no-enforce-eager", "-cc.mode", "0"]

    assert run("serve", tiny_qwen3, *given).code == 0

    assert server.llm_args == {
        "model": str(tiny_qwen3),
        "log_stats": False,
        "stage_overrides": {},
        "max_inflight": 3,
        "request_timeout_s": 1.5,
        "max_model_len": 1000,
        "dtype": "float32",
        "enforce_eager": False,
        "served_model_name": ["a", "b"],
        "reasoning_parser": "qwen3",
        "compilation_config": {"mode": 0},
    }
    assert (server.args.port, server.args.shutdown_timeout, server.args.enable_log_requests) == (8091, 7, True)
    assert server.args.structured_outputs_config.reasoning_parser == "qwen3"


def test_a_flag_with_its_default_value_is_explicit(run, server: Server, tiny_qwen3: Path) -> None:
    run("serve", tiny_qwen3, "--gpu-memory-utilization", "0.92")
    assert server.llm_args["gpu_memory_utilization"] == 0.92


def test_every_pipeline_option_is_a_flag(run, server: Server, tiny_qwen3: Path) -> None:
    given = ["--stage-configs-path", "text", "--trace-file", "t.json", "--init-timeout", "1", "--max-queued", "2"]
    given += ["--stage-init-timeout", "3", "--request-timeout-s", "0.5", "--max-inflight", "4"]
    given += ["--distributed-backend", "ray", "--ray-address", "10.0.0.1:6379"]

    run("serve", tiny_qwen3, *given, "--shm-threshold-bytes", "5")

    assert {name: server.llm_args[name] for name in OPTIONS} == {
        "stage_configs_path": "text",
        "trace_file": "t.json",
        "init_timeout": 1.0,
        "stage_init_timeout": 3.0,
        "request_timeout_s": 0.5,
        "max_inflight": 4,
        "max_queued": 2,
        "distributed_backend": "ray",
        "ray_address": "10.0.0.1:6379",
        "shm_threshold_bytes": 5,
    }
    assert OmniArgs.from_kwargs(**server.llm_args).engine_args == {}


def test_a_checkpoint_of_the_package_is_served_under_its_name(run, server: Server) -> None:
    assert run("serve", "shapes").code == 0
    assert server.args.served_model_name == ["shapes"]
    assert server.llm_args["model"].endswith("/coloured_shapes/checkpoints/shapes")


def test_flags_for_single_stages(run, server: Server, tiny_qwen3_omni_moe: Path, tmp_path: Path) -> None:
    config = tmp_path / "flags.yaml"
    config.write_text("port: 8123\nmax-model-len: 512\nstage:\n  talker: {engine_args: {seed: 1, max_num_seqs: 2}}\n")

    result = run(
        "serve", tiny_qwen3_omni_moe, f"--config={config}", "--stage.talker.seed", "2", "--stage.0.runtime.cpus", "1"
    )

    assert result.code == 0
    assert server.llm_args["stage_overrides"] == {
        "talker": {"engine_args": {"seed": 2, "max_num_seqs": 2}},
        "0": {"runtime": {"cpus": 1}},
    }
    assert (server.args.port, server.llm_args["max_model_len"]) == (8123, 512)


def test_a_pipeline_of_diffusion_stages_only(run, server: Server, tiny_diffusion) -> None:
    model = tiny_diffusion("z_image")
    names = ["--served-model-name", "model", "--allowed-local-media-path", "/tmp", "--lora-modules", "ink=a/b"]
    given = ["--vae-tiling", "--cache-config", "{threshold: 0.1}", "--max-pixels", "4096", "--dtype", "float32"]

    assert run("serve", model, *names, *given).code == 0

    assert server.args.served_model_name == ["model"]
    assert server.llm_args == {
        "model": str(model),
        "log_stats": True,
        "stage_overrides": {},
        "vae_tiling": True,
        "cache_config": {"threshold": 0.1},
        "max_pixels": 4096,
        "dtype": "float32",
        "lora_modules": {"ink": "a/b"},
    }


def test_the_server_loads_adapters_of_a_vllm_stage(run, server: Server, tiny_qwen3: Path) -> None:
    assert run("serve", tiny_qwen3, "--enable-lora", "--lora-modules", "ink=a/b").code == 0

    assert [module.name for module in server.args.lora_modules] == ["ink"]
    assert "lora_modules" not in server.llm_args


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--headless"], "--headless has no effect: one server feeds the pipeline"),
        (["--data-parallel-size", "2"], "--data-parallel-size has no effect"),
        (["--api-server-count", "4"], "--api-server-count has no effect"),
        (["--nnodes", "2"], "--nnodes has no effect: all stages run on this machine"),
        (["--grpc"], "--grpc has no effect"),
        (["--runner", "pooling"], "without --omni"),
        (["--max-num-queued-reqs", "4"], "use --max-queued"),
        (["--mm-processor-cache-type", "shm"], "--mm-processor-cache-type has no effect"),
        (["--max-modl-len", "3"], "unrecognized arguments: --max-modl-len 3; did you mean '--max-model-len'?"),
        (["--max-inflght=3"], "did you mean '--max-inflight'?"),
        (["--max-inflight", "many"], "--max-inflight: Value many cannot be converted"),
        (["--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "mine"], "invalid tool call parser: mine"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml: cannot be read"),
        (["--stage.talker.seed"], "--stage.talker.seed needs a value"),
        (["--stage", "{"], "is not JSON"),
        (["--chat-template", "/nowhere.jinja"], "chat template"),
        (["--max-request-bytes", "9999999999"], "--max-total-request-bytes 2147483648 is less than"),
        (["--video-dir", "/nowhere"], "must be an existing directory"),
        (["--max-media-bytes", "4XB"], "--max-media-bytes: '4XB' is not a number of bytes; write 4096, 512MiB or 4GiB"),
        (["--port", "1", "--port=2"], "--port is given twice; remove one of them"),
        (["-tp", "1", "--tensor-parallel-size", "1"], "-tp and --tensor-parallel-size are one option"),
        (["--max_num_seqs=1", "--max-num-seqs=2"], "--max_num_seqs and --max-num-seqs are one option"),
        (["--stage.a.seed=1", "--stage.a.seed=2"], "--stage.a.seed is given twice"),
        (["--stage", '{"a": {}, "a": {}}'], "the key 'a' is given twice"),
        (["--max-total-realtime-bytes=1MiB"], "less than --max-realtime-message-bytes"),
        (["--max-media-bytes", "0KiB"], "--max-media-bytes: must be at least 1, not 0KiB"),
        (["--max-realtime-speculative-responses=-1"], "must be at least 0, not -1"),
    ],
)
def test_a_wrong_or_unsupported_flag_is_one_message(run, server: Server, given: list[str], words: str) -> None:
    result = run("serve", "MODEL", *given)
    assert result.code == 2
    assert words in result.err and "Traceback" not in result.err
    assert not vars(server)


def test_an_unsupported_flag_with_a_harmless_value_is_allowed(run, server: Server, tiny_qwen3: Path) -> None:
    assert (
        run("serve", tiny_qwen3, "--data-parallel-size", "1", "--api-server-count", "1", "--runner", "generate").code
        == 0
    )
    assert set(server.llm_args) == {"model", "log_stats", "stage_overrides"}


def test_what_operators_need_reaches_every_engine(run, server: Server, tiny_qwen3: Path) -> None:
    profiler = {"profiler": "torch", "torch_profiler_dir": "/tmp/traces"}
    assert run("serve", tiny_qwen3, "--profiler-config", json.dumps(profiler), "--enable-sleep-mode").code == 0
    assert server.llm_args["profiler_config"] == profiler and server.llm_args["enable_sleep_mode"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("stage.talker.seed: 1", "write it as a mapping"),
        ("nosuch: 1", "--nosuch"),
        ("port: 1\nport: 2", "the key 'port' is given twice"),
        ("max_num_seqs: 1\nmax-num-seqs: 2", "the key 'max-num-seqs' is given twice"),
    ],
)
def test_a_wrong_configuration_file(run, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    result = run("serve", "MODEL", "--config", path)
    assert result.code == 2 and words in result.err


@pytest.mark.parametrize(
    ("given", "meant"), [("/omni", "/omni"), ("omni/", "/omni"), ("/a//b/", "/a/b"), ("/", ""), ("", None)]
)
def test_a_root_path_as_people_write_it(given: str, meant: str | None) -> None:
    assert OmniServeCommand().parse(["m", f"--root-path={given}"]).args.root_path == meant


def test_the_model_is_required(run) -> None:
    result = run("serve", "--port", "8000")
    assert (result.code, result.err) == (
        2,
        "vllm-omni: error: the model is missing; write: vllm serve MODEL --omni [options]\n",
    )


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere"])
def test_a_model_that_does_not_exist(run, server: Server, model: str) -> None:
    result = run("serve", model, "--served-model-name", "m")
    assert result.code == 1
    assert f"{model!r} is no checkpoint: there is no such folder" in result.err


def test_a_mistyped_name_is_reported_before_vllm_is_looked_for(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "require_vllm", lambda: pytest.fail("it looks for vLLM"))
    result = run("serve", "shpes", "--omni")
    assert result.code == 1
    assert result.err.startswith("vllm-omni: error: there is no checkpoint 'shpes'; did you mean 'shapes'?")
    monkeypatch.undo()
    assert "did you mean 'shapes'?" in run("config", "show", "shpes").err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            StageStartError("stage 1 (talker) failed to start: no memory", 1),
            "error: stage 1 (talker) failed to start: no memory",
        ),
        (OSError(errno.EADDRINUSE, "Address already in use"), "Address already in use; choose another --port"),
    ],
)
def test_an_error_at_the_start_is_one_message(run, monkeypatch, tiny_qwen3: Path, error: Exception, words: str) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(server_process, "run", fail)
    result = run("serve", tiny_qwen3)
    assert result.code == 1
    assert words in result.err and "Traceback" not in result.err


def test_a_bug_keeps_its_traceback(run, monkeypatch, tiny_qwen3: Path) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "weights")

    monkeypatch.setattr(server_process, "run", fail)
    with pytest.raises(FileNotFoundError):
        run("serve", tiny_qwen3)


def test_help_needs_no_vllm(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints in a fraction of a second what the parser takes many to build."""
    monkeypatch.setattr(cli, "require_vllm", lambda: pytest.fail("it looks for vLLM"))
    page = run("serve", "--omni", "--help")
    assert page.code == 0 and page.out == run("serve", "MODEL", "-h").out
    for kind in ("laptop", "omni", "speech", "images", "videos", "plain text"):
        assert re.search(rf"^  .*{kind}.* vllm serve \S+ --omni", page.out, re.MULTILINE), kind
    assert page.out.startswith("usage: vllm serve MODEL --omni [options]") and page.out.endswith(HINT)
    page = run("config", "show", "--help")
    assert page.code == 0 and page.out.startswith("usage: vllm-omni config show MODEL [--json]")
    assert page.out.endswith(HINT) and page.out == run("config", "--help").out


def test_help_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from vllm_omni.entrypoints.cli.main import main; sys.argv[1:] = ['serve', '--help']; main();"
        "print({'vllm', 'torch'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith(f"{HINT}set()\n")


def test_help_of_options(run) -> None:
    ours = run("serve", "--help=omni").out
    limits = run("serve", "--help=omnilimits").out
    for flag in ("--max-total-request-bytes", "--video-dir", "--max-stored-videos", "--max-stored-video-bytes"):
        assert flag in limits
    for flag in ("--stage-configs-path", "--init-timeout", "--stage JSON", "(default: 600.0)"):
        assert flag in ours
    names = re.findall(r"^  (--[a-z-]+)", limits, re.MULTILINE)
    assert len(names) > 20 and names == sorted(names)
    for page in (ours, limits, run("serve", "--help=all").out):
        assert page.endswith(HINT)


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return OmniServeCommand().subparser_init(FlexibleArgumentParser().add_subparsers())


def test_help_names_all_groups(parser: FlexibleArgumentParser) -> None:
    titles = {group.title for group in parser._action_groups if group._group_actions}
    assert titles - {"positional arguments", "options"} == {*GROUPS, *VLLM_GROUPS}
    assert list(VLLM_GROUPS) == sorted(VLLM_GROUPS, key=str.casefold)


def test_the_examples_of_help_have_real_flags(parser: FlexibleArgumentParser) -> None:
    known = {flag for action in parser._actions for flag in action.option_strings}
    examples = re.findall(r"vllm serve (.*)", serve_page())[1:]
    assert {flag for line in examples for flag in re.findall(r"--[a-z-]+", line)} <= known


def test_each_option_of_ours_is_explained_by_itself(parser: FlexibleArgumentParser) -> None:
    """Options are sorted, so that none has a neighbour to refer to."""
    ours = [action for group in parser._action_groups if group.title in GROUPS for action in group._group_actions]
    assert len(ours) > 70
    for action in ours:
        assert action.help, action.dest
        assert not re.search(r"^(The same|Of )|\b(see )?(above|below)\b|\bsuch (a )?files?\b", action.help), action.help


@pytest.mark.parametrize("flag", ["--max-request-bytes", "--shm-threshold-bytes", "--kv-cache-memory-bytes"])
@pytest.mark.parametrize(("text", "size"), [("900MiB", 900 << 20), ("4096", 4096), ("1g", 10**9)])
def test_sizes_have_units_in_every_option_of_bytes(
    run, server: Server, tiny_qwen3: Path, flag: str, text: str, size: int
) -> None:
    assert run("serve", tiny_qwen3, flag, text).code == 0
    name = flag.removeprefix("--").replace("-", "_")
    assert server.llm_args.get(name, vars(server.args)[name]) == size


def test_every_option_of_bytes_reads_sizes_alike(parser: FlexibleArgumentParser) -> None:
    options = [action for action in parser._actions if action.dest.endswith("_bytes")]
    assert len(options) > 15
    for action in options:
        assert action.type("4GiB") == 4 << 30, action.dest


def test_unsupported_flags_exist_in_vllm(parser: FlexibleArgumentParser) -> None:
    """Under these names: a flag that vLLM renames would be ignored."""
    assert {action.dest for action in parser._actions} >= unsupported_flags.NAMES


def test_the_document_names_real_flags(parser: FlexibleArgumentParser) -> None:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--help", "--json", "--stage", "--omni"}
    named -= {"--gpus", "--gpu-memory", "--say", "--backend", "--endpoint", "--percentile-metrics"}  # of other commands
    assert len(named) > 20
    assert named <= {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize(
    "given", [["--voice-map", '{"alloy": "Chelsie"}'], ["--voice-map.alloy", "Chelsie"], ["--voice-map.alloy=Chelsie"]]
)
def test_voice_map(run, server: Server, tiny_qwen3_omni_moe: Path, given: list[str]) -> None:
    assert run("serve", tiny_qwen3_omni_moe, *given).code == 0
    assert server.args.voice_map == {"alloy": "Chelsie"}
    assert "voice_map" not in server.llm_args


def test_voice_map_in_a_file(run, server: Server, tiny_qwen3_omni_moe: Path, tmp_path: Path) -> None:
    config = tmp_path / "flags.yaml"
    config.write_text("voice-map: {alloy: chelsie, narrator: aiden}\n")
    assert run("serve", tiny_qwen3_omni_moe, f"--config={config}").code == 0
    assert server.args.voice_map == {"alloy": "chelsie", "narrator": "aiden"}


@pytest.mark.parametrize(
    ("voice_map", "words"),
    [
        ('{"alloy": "nobody"}', "'alloy' is mapped to an unknown voice 'nobody'; the model has ethan, aiden, chelsie"),
        ('{"Ethan": "aiden"}', "'ethan' is a voice of the model"),
        ('{"default": "aiden"}', "'default' is a voice of the model"),
        ('{"alloy": 1}', 'is not of the form {"NAME": "VOICE"}'),
        ('["alloy"]', 'is not of the form {"NAME": "VOICE"}'),
        ("alloy=ethan", "is not JSON"),
    ],
)
def test_a_wrong_voice_map_is_refused_before_anything_starts(
    run, server: Server, tiny_qwen3_omni_moe: Path, voice_map: str, words: str
) -> None:
    result = run("serve", tiny_qwen3_omni_moe, "--voice-map", voice_map)
    assert result.code == 2 and "--voice-map" in result.err and words in result.err
    assert not hasattr(server, "args")


def test_keys_come_from_a_file(run, server: Server, tiny_qwen3: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \n")
    assert run("serve", tiny_qwen3, "--api-key", "zero", "--api-key-file", keys).code == 0
    assert api_keys(server.args) == ["zero", "one", "two"]
    assert "api_key" not in str(server.llm_args)
    assert run("serve", tiny_qwen3, "--api-key-file", keys).code == 0
    assert api_keys(server.args) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read: No such file"), (b" \n", "has no key"), (b"\xff\xfe", "cannot be read: 'utf-8' codec")],
)
def test_a_file_without_a_key_opens_no_server(
    run, server: Server, tiny_qwen3: Path, tmp_path: Path, content: bytes | None, words: str
) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_bytes(content)
    result = run("serve", tiny_qwen3, "--api-key-file", keys)
    assert result.code == 2 and f"--api-key-file {keys} {words}" in result.err
    assert not hasattr(server, "args")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--api-key=secret"], "give --playground-auth NAME:PASSWORD"),
        ([f"--api-key-file={__file__}"], "give --playground-auth NAME:PASSWORD"),
        (["--playground-auth=ann"], "is not of the form NAME:PASSWORD"),
        (["--uds=/tmp/socket"], "browsers cannot reach --uds"),
    ],
)
def test_a_playground_that_cannot_be_served_is_refused(
    run, server: Server, tiny_qwen3: Path, flags: list[str], words: str
) -> None:
    pytest.importorskip("gradio")
    result = run("serve", tiny_qwen3, "--playground", *flags)
    assert result.code == 2 and words in result.err
    assert not hasattr(server, "args")
