# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's own stage configuration describes its pipeline; it runs no code and sets nothing of the operator's."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_omni.config.loader import load_pipeline_config, parse_pipeline_config
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.config.utils import find_checkpoint, stage_configs_dir
from vllm_omni.errors import StageConfigError

PROCESSOR = "vllm_omni.model_executor.models.csm.codec.BackboneToCodec"


def harmless() -> dict[str, Any]:
    """A configuration of two stages, with a key of every kind that a checkpoint may set."""
    return {
        "stage_args": [
            {
                "stage_id": 0,
                "engine_type": "AR",
                "runtime": {"process": True, "devices": "0", "max_batch_size": 4, "max_queued": 8},
                "engine_args": {
                    "model_stage": "talker",
                    "model": "talker",
                    "tokenizer": "talker",
                    "model_arch": "CsmForConditionalGeneration",
                    "max_model_len": 64,
                    "generation_config": "vllm",
                },
                "custom_prompt_func": "vllm_omni.model_executor.models.csm.prompt.CsmPromptProcessor",
                "default_sampling_params": {"temperature": 0.5},
            },
            {
                "stage_id": 1,
                "engine_type": "generation",
                "engine_args": {"model_stage": "codec"},
                "engine_input_source": [0],
                "custom_process_input_func": PROCESSOR,
                "final_output": True,
                "final_output_type": "audio",
            },
            {
                "stage_id": 2,
                "engine_type": "DiT",
                "engine_args": {"model_stage": "painter", "max_steps": 8, "pipeline_class": "ZImagePipeline"},
                "final_output": True,
                "final_output_type": "image",
            },
        ],
        "runtime": {
            "enabled": True,
            "max_inflight": 4,
            "request_timeout_s": 60.0,
            "edges": [{"from": 0, "to": 1, "window_size": 8, "first_window_size": 2}],
        },
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint" / "talker").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoint" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "checkpoint"


def parse(raw: dict[str, Any], checkpoint: Path) -> PipelineConfig:
    return parse_pipeline_config(raw, "stage_config.yaml", untrusted_checkpoint=checkpoint)


def with_value(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(harmless())
    node: Any = raw
    for key in path[:-1]:
        node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
    node[path[-1]] = value
    return raw


def test_a_checkpoint_describes_its_pipeline(checkpoint: Path) -> None:
    config = parse(harmless(), checkpoint)

    assert config.stages[0].engine_args["max_model_len"] == 64
    assert config.window(0, 1, None).window_size == 8


@pytest.mark.parametrize("name", ["shapes", "shapes-painter"])
def test_the_shipped_checkpoints_set_nothing_else(name: str) -> None:
    folder = Path(find_checkpoint(name))
    file = folder / "stage_config.yaml"
    assert load_pipeline_config(file, untrusted_checkpoint=folder) == load_pipeline_config(file)


@pytest.mark.parametrize("file", sorted(stage_configs_dir().glob("*.yaml")), ids=lambda file: file.stem)
def test_a_checkpoint_may_have_a_copy_of_a_shipped_configuration(file: Path, checkpoint: Path) -> None:
    raw = yaml.safe_load(file.read_text())
    for stage in raw["stage_args"]:
        for key in ("model", "tokenizer"):
            if folder := stage["engine_args"].get(key):
                (checkpoint / folder).mkdir(parents=True, exist_ok=True)
        for key in ("tensor_parallel_size", "quantization"):  # of the variants for other machines
            stage["engine_args"].pop(key, None)
    parse(raw, checkpoint)


STAGE = ("stage_args", 0)
ENGINE_ARGS = (*STAGE, "engine_args")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*ENGINE_ARGS, "trust_remote_code"), True),
        ((*ENGINE_ARGS, "worker_cls"), "os.system"),
        ((*ENGINE_ARGS, "scheduler_cls"), "my.Scheduler"),
        ((*ENGINE_ARGS, "worker_extension_cls"), "my.Extension"),
        ((*ENGINE_ARGS, "distributed_executor_backend"), "my.Executor"),
        ((*ENGINE_ARGS, "logits_processors"), ["my.Processor"]),
        ((*ENGINE_ARGS, "additional_config"), {"a": 1}),
        ((*ENGINE_ARGS, "hf_overrides"), {"auto_map": {"AutoConfig": "a.B"}}),
        ((*ENGINE_ARGS, "hf_config_path"), "/etc"),
        ((*ENGINE_ARGS, "load_format"), "pt"),
        ((*ENGINE_ARGS, "kv_transfer_config"), {"kv_connector_module_path": "my.module"}),
        ((*ENGINE_ARGS, "allowed_local_media_path"), "/"),
        ((*ENGINE_ARGS, "otlp_traces_endpoint"), "http://elsewhere"),
        ((*ENGINE_ARGS, "generation_config"), "/etc"),
        ((*ENGINE_ARGS, "model"), "elsewhere/other"),
        ((*ENGINE_ARGS, "model"), "../elsewhere"),
        ((*ENGINE_ARGS, "model"), "/tmp"),
        ((*ENGINE_ARGS, "model"), "link"),
        ((*ENGINE_ARGS, "tokenizer"), "~"),
        (("stage_args", 2, "engine_args", "use_safetensors"), False),
        (("stage_args", 2, "engine_args", "pipeline_class"), "my.Pipeline"),
        (("stage_args", 2, "engine_args", "lora_modules"), {"a": "/a.safetensors"}),
        (("stage_args", 2, "engine_args", "attention_backend"), "flash_hub"),
        ((*STAGE, "custom_prompt_func"), "os.system"),
        ((*STAGE, "custom_prompt_func"), PROCESSOR),  # registered, but not as this
        (("stage_args", 1, "custom_process_input_func"), "my.Processor"),
        ((*STAGE, "output_connectors"), {"to_stage_1": "big"}),
        ((*STAGE, "runtime", "node"), "elsewhere"),
        ((*STAGE, "runtime", "replicas"), 1000),
        ((*STAGE, "runtime", "process"), False),
        (("runtime", "distributed_backend"), "ray"),
        (("runtime", "ray_address"), "elsewhere:6379"),
        (("runtime", "encrypt"), "control"),
        (("runtime", "restart"), {"max_restarts": 0}),
    ],
)
def test_everything_else_is_the_operators(path: tuple[Any, ...], value: Any, checkpoint: Path) -> None:
    with pytest.raises(StageConfigError) as error:
        parse(with_value(path, value), checkpoint)

    message = str(error.value)
    assert path[-1] in message and "--trust-remote-code" in message and "\n" not in message
    assert ("stage 0 (talker)" in message) is (path[:2] == STAGE)


@pytest.mark.parametrize("key", ["function", "batch_function"])
def test_no_code_is_imported_before_it_is_refused(
    key: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code_of_a_checkpoint.py").write_text("def run(request, sources): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    stage = {"stage_id": 0, "engine_type": "function", key: "code_of_a_checkpoint.run"}
    raw = {"stage_args": [stage | {"final_output": True, "final_output_type": "text"}]}

    with pytest.raises(StageConfigError, match=rf"stage 0 \(stage0\): {key}: .*'code_of_a_checkpoint\.run'"):
        parse(raw, checkpoint)

    assert "code_of_a_checkpoint" not in sys.modules
    assert parse_pipeline_config(raw, "the operator's").stages[0].kind.name == "function"
    sys.modules.pop("code_of_a_checkpoint")
