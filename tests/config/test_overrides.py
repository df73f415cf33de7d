# SPDX-License-Identifier: Apache-2.0
"""Overrides of a single stage replace values of its configuration."""

import pytest

from vllm_omni.config.overrides import merge, override_stage
from vllm_omni.config.stage import OmniStageConfig, StageRuntimeConfig
from vllm_omni.errors import StageConfigError

TALKER = OmniStageConfig(
    stage_id=1,
    engine_args={"model_stage": "talker", "gpu_memory_utilization": 0.2, "max_num_seqs": 4},
    runtime=StageRuntimeConfig(devices="0", max_batch_size=8),
    default_sampling_params={"temperature": 0.9, "top_k": 50},
)


def test_sections_are_merged_and_other_keys_are_engine_arguments() -> None:
    override = {"seed": 3, "engine_args": {"dtype": "float32"}, "runtime": {"devices": 1}}

    stage = override_stage(TALKER, override | {"default_sampling_params": {"temperature": 0.0}})

    assert stage.engine_args == TALKER.engine_args | {"seed": 3, "dtype": "float32"}
    assert (stage.runtime.devices, stage.runtime.max_batch_size) == (1, 8)
    assert stage.default_sampling_params == {"temperature": 0.0, "top_k": 50}


def test_runtime_keys_replace_the_engine_arguments_of_the_same_meaning() -> None:
    stage = override_stage(TALKER, {"runtime": {"memory": 0.5, "max_batch_size": 2}})

    assert stage.engine_args == {"model_stage": "talker"}
    assert stage.vllm_engine_args["max_num_seqs"] == 2


def test_a_function_is_replaced_by_another() -> None:
    speaker = OmniStageConfig(stage_id=1, engine_type="function", batch_function="operator.neg")
    stage = override_stage(speaker, {"function": "operator.add", "rate": 2})
    assert (stage.function, stage.batch_function, stage.engine_args) == ("operator.add", None, {"rate": 2})
    with pytest.raises(StageConfigError, match=r"override for stage 1 \(stage1\): function: .* no 'ad'; did you mean"):
        override_stage(speaker, {"function": "operator.ad"})


def test_a_vllm_engine_replaces_a_function_that_accepts_audio() -> None:
    asr = OmniStageConfig(
        stage_id=1,
        engine_type="function",
        engine_args={"a": 1},
        function="operator.neg",
        accepts="audio",
        default_sampling_params={"b": 2},
    )
    override = {"engine_type": "AR", "model": "a/b", "default_sampling_params": {"language": "en"}}
    stage = override_stage(asr, override)
    assert (stage.kind.name, stage.function, stage.accepts) == ("AR", None, "audio") and stage.kind.accepts_input
    assert stage.engine_args == {"model_stage": "stage1", "model": "a/b"}
    assert stage.default_sampling_params == {"language": "en"}
    assert override_stage(asr, {"engine_type": "function"}) == asr
    for wrong, words in (
        ({"engine_type": "AR"}, "needs a checkpoint that transcribes: set engine_args.model"),
        ({"engine_type": "AR", "model": "a", "function": "operator.add"}, "AR has no function; give one of them"),
        ({"engine_type": "DiT"}, "function cannot be 'DiT'; a function that accepts audio"),
    ):
        with pytest.raises(StageConfigError, match=rf"override for stage 1 \(stage1\): engine_type.*{words}"):
            override_stage(asr, wrong)
    with pytest.raises(StageConfigError, match="AR cannot be 'function'"):
        override_stage(TALKER, {"engine_type": "function"})


def test_a_function_replaces_a_vllm_stage_that_transcribes() -> None:
    asr = OmniStageConfig(
        stage_id=1,
        engine_type="AR",
        engine_args={"model_stage": "asr", "model": "a/b", "dtype": "float32"},
        runtime=StageRuntimeConfig(devices="0", max_batch_size=4),
        accepts="audio",
        default_sampling_params={"language": "en"},
    )
    stage = override_stage(asr, {"function": "operator.neg", "default_sampling_params": {"c": 1}})
    assert (stage.kind.name, stage.function, stage.accepts) == ("function", "operator.neg", "audio")
    assert (stage.engine_args, stage.runtime) == ({"model_stage": "asr"}, StageRuntimeConfig())
    assert stage.default_sampling_params == {"c": 1}
    assert override_stage(asr, {"function": "operator.neg", "engine_type": "function"}).function == "operator.neg"
    with pytest.raises(StageConfigError, match=r"override for stage 1 \(asr\): function: .* no 'ad'; did you mean"):
        override_stage(asr, {"function": "operator.ad"})
    with pytest.raises(StageConfigError, match="AR has no function; give one of them"):
        override_stage(asr, {"function": "operator.neg", "engine_type": "AR"})
    with pytest.raises(StageConfigError, match="engine_type function needs a function"):
        override_stage(asr, {"engine_type": "function"})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"runtime": {"memry": 1}}, r"stage 1 \(talker\): there is no runtime\.memry; did you mean 'memory'"),
        ({"runtime": {"max_batch_size": "many"}}, r"runtime\.max_batch_size: Expected `int"),
        ({"engine_args": 3}, "engine_args is a section, 3 is not a mapping"),
    ],
)
def test_errors_name_stage_and_key(override: dict, words: str) -> None:
    with pytest.raises(StageConfigError, match=words):
        override_stage(TALKER, override)


def test_a_merge_is_deep_and_changes_neither_mapping() -> None:
    first, second = {"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "b": {"z": 4}}

    assert merge(first, second) == {"a": {"x": 1, "y": 3}, "b": {"z": 4}}
    assert first == {"a": {"x": 1, "y": 2}, "b": 1}
