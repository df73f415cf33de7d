# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni config show`: the resolved configuration and the source of each value."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni.config.loader import load_pipeline_config, parse_pipeline_config
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.entrypoints.cli import doctor
from vllm_omni.entrypoints.cli.config import locate_values
from vllm_omni.entrypoints.cli.findings import Platform

STAGES = """\
# A comment.
stage_args:
  - stage_id: 7
    engine_args:
      model_stage: talker   # named here
      compilation_config: {mode: 0}

  - engine_args: {dtype: float32}
    stage_id: 3
runtime:
  edges:
    - {from: 3, to: 7}
"""


def sources(text: str) -> dict[str, list[str]]:
    """The sources of every key, in the order of the stages."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"[\s#-]*(\w+): .*  # (.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def test_every_value_has_its_source(run, tiny_qwen3_omni_moe: Path) -> None:
    given = ["--max-model-len", "64", "--max-inflight", "3", "--stage.talker.runtime.memory", "64MiB"]
    given += ["--stage.talker.quantization", "int8", "--stage.talker.enforce_eager", "true"]

    result = run("config", "show", tiny_qwen3_omni_moe, *given)

    assert result.code == 0
    found = sources(result.out)
    text = (stage_configs_dir() / "qwen3_omni_moe.yaml").read_text().splitlines()
    line = next(i for i, line in enumerate(text, start=1) if "model_stage: talker" in line)
    assert found["model_stage"][1] == f"qwen3_omni_moe.yaml:{line}"
    assert found["max_model_len"] == ["command line: --max-model-len"] * 3
    assert found["max_inflight"] == ["command line: --max-inflight"]
    assert found["memory"] == ["command line: --stage.talker.runtime.memory"]
    assert found["max_restarts"] == ["default"]
    assert found["weights"] == ["computed: quantization"]
    # On a CPU memory is the size of the KV cache; our default applies to stages without it.
    assert found["kv_cache_memory_bytes"][1] == "computed: runtime.memory"
    assert "# kv_cache_memory_bytes: 67108864 " in result.out
    assert found["max_num_seqs"] == ["computed: runtime.max_batch_size"] * 3
    values = [line.partition("  # ")[0] for line in result.out.splitlines() if "  # " in line]
    widths = {len(value) for value in values if 0 < len(value.rstrip()) <= 70}
    assert widths == {70}, "not aligned"  # but for longer ones


def test_where_each_replica_will_be(run, tiny_qwen3_omni_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    first = sorted(os.sched_getaffinity(0))[0]
    flags = ["--stage.talker.runtime.replicas", "2", "--stage.talker.runtime.cpus", f'["{first}", "{first}"]']
    result = run("config", "show", tiny_qwen3_omni_moe, *flags)
    assert result.code == 0
    for name in ("talker.0", "talker.1"):
        assert re.search(
            rf"^ +# {re.escape(name)}: {{cpus: \[{first}\], threads: 1}} +# computed", result.out, re.MULTILINE
        )


def test_the_output_is_an_equivalent_stage_configuration(run, tiny_qwen3_omni_moe: Path) -> None:
    result = run("config", "show", tiny_qwen3_omni_moe)

    shown = parse_pipeline_config(yaml.safe_load(result.out), "the output")

    shipped = load_pipeline_config(stage_configs_dir() / "qwen3_omni_moe.yaml")
    assert shown.runtime == shipped.runtime
    for stage, before in zip(shown.stage_args, shipped.stage_args, strict=True):
        assert stage == before


@pytest.mark.parametrize("command", ["config show", "doctor", "serve"])
def test_no_command_trusts_the_configuration_of_a_checkpoint(
    run, tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(doctor, "probe_platform", lambda: (Platform("cpu", []), []))
    monkeypatch.setattr(doctor, "import_error", lambda module: None)
    model = shutil.copytree(tiny_qwen3, tmp_path / "model")
    stage: dict[str, Any] = yaml.safe_load((stage_configs_dir() / "text.yaml").read_text())["stage_args"][0]
    stage["engine_args"]["worker_cls"] = "my_package.Worker"
    (model / "stage_config.yaml").write_text(yaml.safe_dump({"stage_args": [stage]}))

    # `serve` reads the configuration before anything starts, to know who reads this flag.
    result = run(*command.split(), model, "--allowed-local-media-path", tmp_path)

    assert result.code == 1
    assert "stage 0 (text): engine_args.worker_cls: " in result.out + result.err
    assert "--trust-remote-code" in result.out + result.err and "Traceback" not in result.err


def test_a_length_that_the_checkpoint_does_not_have_is_reduced(run, tiny_qwen3_omni_moe: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_qwen3_omni_moe, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    config["thinker_config"]["text_config"]["max_position_embeddings"] = 1024
    (model / "config.json").write_text(json.dumps(config))

    result = run("config", "show", model)

    assert "# max_model_len: 1024 " in result.out
    assert "reduced to what the checkpoint has" in sources(result.out)["max_model_len"]
    result = run("config", "show", model, "--max-model-len", "2048")
    assert result.code == 1 and "stage 0 (thinker): max_model_len 2048 is more than" in result.err


def test_a_diffusion_model_needs_no_file(run, tiny_diffusion) -> None:
    result = run("config", "show", tiny_diffusion("z_image"), "--vae-tiling", "--json")

    shown: dict[str, Any] = json.loads(result.out)
    (stage,) = shown["stage_args"]
    assert shown["source"] is None
    assert stage["engine_args"]["pipeline_class"] == {
        "value": "ZImagePipeline",
        "source": "checkpoint: model_index.json",
    }
    assert stage["engine_args"]["vae_tiling"] == {"value": True, "source": "command line: --vae-tiling"}
    assert stage["engine_args"]["max_steps"] == {"value": 200, "source": "default"}
    assert stage["final_output_type"] == {"value": "image", "source": "checkpoint: model_index.json"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--stage.talkr.seed", "1"], "there is no stage 'talkr'; this pipeline has 'thinker' (0), 'talker' (1)"),
        (
            ["--stage.talker.sed", "1"],
            "stage 1 (talker): engine_args: unknown engine argument 'sed'; did you mean 'seed'?",
        ),
        (["--stage.1.runtime.devises", "1"], "there is no runtime.devises; did you mean 'devices'?"),
        (["--stage-configs-path", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["--vae-tiling"], "no stage of this pipeline has an engine argument 'vae_tiling'"),
        (["--stage.talker.runtime.memory", "1PiB"], "(talker): runtime.memory '1PiB' is not an amount of memory"),
        (["--stage.talker.dtype", "fp16"], "stage 1 (talker): engine_args: dtype: 'fp16' must be 'auto', 'half', "),
        (
            ["--stage.thinker.max_model_len", "4k"],
            "(thinker): engine_args: max_model_len: '4k' must be a valid int",
        ),
        (["--stage.thinker.max_num_seqs", '"3"'], "(thinker): engine_args: max_num_seqs: '3' must be a valid integer"),
        (["--stage.thinker.max_num_seqs", "0"], "max_num_seqs: 0 must be greater than or equal to 1"),
        (["--stage.talker.hf_overrides", "3"], "(talker): engine_args: hf_overrides: 3 must be a valid dictionary or"),
        (["--stage.thinker.tokenizer_mode", "hg"], "'hg' is not one of auto, cohere, "),
        (["--stage.thinker.block_size", "7"], "block_size: 7 must be a multiple of 32 on a CPU"),
        (
            ["--stage.thinker.runtime.max_inflight", "-3"],
            "(thinker): runtime.max_inflight: Expected `int` >= 1, not",
        ),
        (["--request-timeout-s", "nan"], "request_timeout_s: Expected `float` >= 0.0, not nan"),
        (["--init-timeout", "0"], "init_timeout: Expected `float` > 0.0, not 0"),
        (["--max-inflight", "0"], "max_inflight: Expected `int` >= 1, not 0"),
        (["--stage.talker.default_sampling_params.top_p", "7"], "(talker): default_sampling_params: top_p must be in"),
        (
            ["--stage.thinker.default_sampling_params.top_kk", "7"],
            "unknown sampling parameter 'top_kk'",
        ),
    ],
)
def test_an_error_is_one_message(run, tiny_qwen3_omni_moe: Path, given: list[str], words: str) -> None:
    result = run("config", "show", tiny_qwen3_omni_moe, *given)
    assert (result.code, result.out) == (1, "")
    assert words in result.err and "Traceback" not in result.err


def test_a_size_that_is_none_is_an_error_of_usage(run, tiny_qwen3_omni_moe: Path) -> None:
    result = run("config", "show", tiny_qwen3_omni_moe, "--shm-threshold-bytes", "-1")
    assert (result.code, result.out) == (2, "")
    assert "--shm-threshold-bytes: '-1' is not a number of bytes; write 4096, 512MiB or 4GiB" in result.err


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["show", "--help"], 0), ([], 2), (["see"], 2)])
def test_usage(run, arguments: list[str], code: int) -> None:
    result = run("config", *arguments)
    assert result.code == code
    assert "vllm-omni config show MODEL [--json]" in result.out + result.err


def test_lines_by_stage_id_and_key(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(STAGES)

    lines = locate_values(path)

    assert lines["stage_args", 7, "engine_args", "model_stage"] == 5
    assert lines["stage_args", 7, "engine_args", "compilation_config", "mode"] == 6
    assert lines["stage_args", 3, "engine_args", "dtype"] == 8
    assert lines["runtime", "edges", 0, "to"] == 12
    assert ("stage_args", 3, "runtime") not in lines
