# SPDX-License-Identifier: Apache-2.0
"""Which stage configuration a checkpoint's configuration selects, and models that nobody knows."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.diffusion.indexes import write_index
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.resolve import read_pipeline, resolve_pipeline
from vllm_omni.errors import StageConfigError
from vllm_omni.model_executor.registry import OMNI_PIPELINES
from vllm_omni.model_packages import find_models

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
}


def stage_config_of(folder: Path, config: Any, *architectures: str) -> str:
    """The name of the file, for a checkpoint that has only its configuration."""
    content = config if isinstance(config, dict) else config.to_dict()
    (folder / "config.json").write_text(json.dumps(content | {"architectures": list(architectures)}))
    source = read_pipeline(OmniArgs(model=str(folder))).source
    assert source is not None
    return source.name


@pytest.mark.parametrize(
    ("config", "architecture", "words"),
    [
        ({"model_type": "nobody"}, "NobodyModel", ["model type `nobody`"]),
        (
            transformers.VitMatteConfig(),
            "VitMatteForImageMatting",
            [
                "model_type 'vitmatte' (architecture VitMatteForImageMatting)",
                "no architecture of this name that writes text",
                "transformers has no class of this name that makes sound of a text or a sound",
            ],
        ),
        (  # It writes the notes of a recording.
            transformers.Pop2PianoConfig(),
            "Pop2PianoForConditionalGeneration",
            [
                "model_type 'pop2piano' (architecture Pop2PianoForConditionalGeneration)",
                "no architecture of this name that writes text",
                "transformers has no class of this name that makes sound of a text or a sound",
            ],
        ),
    ],
)
@pytest.mark.usefixtures("without_retries")
def test_a_model_that_nobody_knows_is_refused(tmp_path: Path, config: Any, architecture: str, words: list[str]) -> None:
    with pytest.raises(StageConfigError) as error:
        stage_config_of(tmp_path, config, architecture)
    for word in (*words, str(tmp_path), find_models().describe()):
        assert word in str(error.value)
    assert str(error.value).endswith("\nto add a model: docs/adding_a_model.md")


@pytest.mark.parametrize("file", ["model.onnx", "model.gguf"])
def test_a_folder_without_a_configuration_is_refused_as_an_unknown_model(tmp_path: Path, file: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(StageConfigError, match=r"\nto add a model: docs/adding_a_model\.md$"):
        read_pipeline(OmniArgs(model=str(tmp_path)))


@pytest.mark.slow  # vLLM imports a model when it is first asked about it, and keeps what it finds
@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (transformers.BertConfig(), "BertModel"),
        (transformers.Qwen2Config(**SMALL), "Qwen2ForRewardModel"),
    ],
)
def test_a_model_that_writes_no_text_is_refused(tmp_path: Path, config: Any, architecture: str) -> None:
    with pytest.raises(StageConfigError, match=r"runs it as a pooling model, which writes no text; serve it without"):
        stage_config_of(tmp_path, config, architecture)


def test_a_speech_model_of_transformers_runs_alone(tmp_path: Path) -> None:
    config = transformers.VitsConfig().to_dict() | {"architectures": ["VitsModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_pipeline(OmniArgs(model=str(tmp_path)))
    assert read.source is None and read.loaded.stage_args[0].kind.name == "transformers"


def test_a_text_model_of_vllm_runs_alone(tmp_path: Path) -> None:
    assert stage_config_of(tmp_path, transformers.Qwen3Config(**SMALL), "Qwen3ForCausalLM") == "text.yaml"


@pytest.mark.slow
def test_a_text_model_of_vllms_transformers_backend_runs_alone(tmp_path: Path) -> None:
    config = transformers.DiffLlamaConfig(**SMALL)
    assert stage_config_of(tmp_path, config, "DiffLlamaForCausalLM") == "text.yaml"


def test_a_wrong_argument_for_a_text_model_is_not_taken_for_an_unknown_model(tiny_qwen3: Path) -> None:
    assert read_pipeline(OmniArgs(model=str(tiny_qwen3), engine_args={"dtype": "float8"})).source is not None


def test_a_stages_architecture_must_be_known(tiny_csm: Path) -> None:
    with pytest.raises(StageConfigError, match=r"stage 1 \(codec\).*architecture 'CsmCodek'; did you mean 'CsmCodec'"):
        resolve_pipeline(OmniArgs(model=str(tiny_csm), stage_overrides={"codec": {"model_arch": "CsmCodek"}}))


def test_a_diffusers_checkpoint_is_found_by_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_index(tmp_path, "ZImagePipeline")
    assert read_pipeline(OmniArgs(model=str(tmp_path))).source is None
    monkeypatch.setitem(OMNI_PIPELINES, "ZImagePipeline", "text")
    find_models.cache_clear()
    source = read_pipeline(OmniArgs(model=str(tmp_path))).source
    monkeypatch.undo()
    find_models.cache_clear()
    assert source is not None and source.name == "text.yaml"
