# SPDX-License-Identifier: Apache-2.0
"""A stage configuration is parsed, or refused with the file, the key and the remedy."""

import copy
from collections.abc import Iterator, Mapping
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from vllm_omni.config import load_pipeline_config
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.config.stage_config import PipelineConfig, WindowConfig, find_stage
from vllm_omni.config.utils import nearest, stage_configs_dir
from vllm_omni.errors import StageConfigError
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import StageOutput

PROCESSOR = "vllm_omni.model_executor.stage_input_processor.StageInputProcessor"


def valid() -> dict[str, Any]:
    """Every key that a stage configuration may have."""
    return {
        "stage_args": [
            {
                "stage_id": 0,
                "stage_type": "llm",
                "runtime": {"process": True, "devices": "0", "max_batch_size": 4, "requires_multimodal_data": True},
                "engine_args": {
                    "model_stage": "thinker",
                    "model_arch": "A",
                    "worker_cls": "w.W",
                    "scheduler_cls": "s.S",
                    "engine_output_type": "latent",
                    "hf_config_name": "thinker_config",
                    "max_model_len": 64,
                },
                "is_comprehension": True,
                "final_output": True,
                "final_output_type": "text",
                "default_sampling_params": {"temperature": 0.5},
                "output_connectors": {"to_stage_1": "big"},
            },
            {
                "stage_id": 1,
                "engine_type": "generation",
                "engine_args": {"model_stage": "vocoder"},
                "engine_input_source": [0],
                "custom_process_input_func": PROCESSOR,
                "final_output": True,
                "final_output_type": "audio",
                "input_connectors": {"from_stage_0": "big"},
            },
        ],
        "runtime": {
            "enabled": True,
            "defaults": {"window_size": -1, "max_inflight": 8},
            "connectors": {"big": {"name": "SharedMemoryConnector", "extra": {"shm_threshold_bytes": 1024}}},
            "edges": [{"from": 0, "to": 1, "window_size": -1}],
        },
    }


def test_every_key_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(valid()))
    config = load_pipeline_config(path)
    thinker, vocoder = config.stage_args
    assert (thinker.name, thinker.kind.name, vocoder.kind.name) == ("thinker", "AR", "generation")
    assert thinker.vllm_engine_args["max_num_seqs"] == 4
    assert config.targets == {0: [1], 1: []}
    assert config.stages_for(["text"]) == [0]
    assert config.stages_for(["audio"]) == [0, 1]
    assert config.output_types == ["text", "audio"]
    assert config.connector(thinker, 1, shm_threshold_bytes=5).shm_threshold_bytes == 1024
    assert find_stage(config, "vocoder") is find_stage(config, 1) is vocoder


def test_the_scheduler_implies_the_engine_type() -> None:
    raw = valid()
    raw["stage_args"][0]["engine_args"]["scheduler_cls"] = "x.OmniGenerationScheduler"
    assert parse_pipeline_config(raw, "f").stage_args[0].kind.name == "generation"


@pytest.mark.parametrize("policy, counts", [(None, False), ("fcfs", False), ("priority", True)])
def test_priority_counts_in_a_vllm_stage_that_schedules_by_it(policy: str | None, counts: bool) -> None:
    raw = valid()
    if policy is not None:
        raw["stage_args"][0]["engine_args"]["scheduling_policy"] = policy
    assert parse_pipeline_config(raw, "f").stage_args[0].kind.schedules_by_priority is counts


def test_an_edge_has_its_connector() -> None:
    raw = valid()
    raw["runtime"]["connectors"]["big"] = {"name": "InlineConnector"}
    config = parse_pipeline_config(raw, "f")
    assert config.connector(config.stages[0], 1, shm_threshold_bytes=5).name == "InlineConnector"


@pytest.mark.parametrize("path", sorted(stage_configs_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_load(path: Path) -> None:
    assert load_pipeline_config(path).stage_args


@pytest.mark.parametrize("name", ["qwen3_omni_moe_2x80gb", "qwen3_omni_moe_141gb"])
def test_a_variant_differs_in_placement_and_sizes_only(name: str) -> None:
    def without_sizes(name: str) -> Any:
        raw = yaml.safe_load((stage_configs_dir() / f"{name}.yaml").read_text())
        for stage in raw["stage_args"]:
            stage["runtime"].pop("devices")
            for argument in ("gpu_memory_utilization", "max_model_len"):
                stage["engine_args"].pop(argument, None)
        return raw

    assert without_sizes(name) == without_sizes("qwen3_omni_moe")


def change(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    node: Any = raw
    for part in parents:
        node = node[part]
    node[last] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("stage_arg", [], ["'stage_arg'", "did you mean 'stage_args'"]),
        ("stage_args.1.engine_arg", {}, ["stage_args[1].engine_arg'", "did you mean 'engine_args'"]),
        ("stage_args.0.runtime.device", "0", ["runtime.device'", "did you mean 'devices'"]),
        ("runtime.default", {}, ["'runtime.default'", "did you mean 'defaults'"]),
        ("runtime.edges.0.form", 1, ["runtime.edges[0].form'", "did you mean 'from'"]),
        ("runtime.connectors.big.extras", {}, ["extras'", "did you mean 'extra'"]),
        ("stage_args.0.stage_id", "zero", ["stage_args[0].stage_id", "int"]),
        ("stage_args.0.engine_type", "ar", ["stage_args[0].engine_type", "'ar'"]),
        ("stage_args.0.engine_type", "DiT", ["stage_type 'llm' contradicts"]),
        ("stage_args.1.engine_input_source", [7], ["stage 1 (vocoder)", "stage 7", "stages are 0, 1"]),
        ("stage_args.0.engine_input_source", [1], ["[0, 1] form a cycle"]),
        ("stage_args.1.stage_id", 0, ["stage_id 0 is given twice"]),
        ("stage_args.1.engine_args.model_stage", "thinker", ["'thinker' is given twice"]),
        ("stage_args.1.engine_args.model_stage", 3, ["stage 1: engine_args.model_stage: 3 is not a name; write it in"]),
        ("stage_args.1.custom_process_input_func", None, ["custom_process_input_func is missing"]),
        ("stage_args.1.custom_process_input_func", "plain", ["'plain' is not a dotted path"]),
        ("stage_args.1.custom_process_input_func", "no.such.module", ["'no.such.module' cannot be imported"]),
        ("stage_args.1.custom_process_input_func", PROCESSOR + "s", ["did you mean 'StageInputProcessor'"]),
        ("stage_args.1.final_output_type", None, ["final_output needs final_output_type"]),
        ("stage_args.0.runtime.devices", "all", ["stage 0 (thinker)", "runtime.devices 'all'"]),
        ("stage_args.1.runtime", {"requires_multimodal_data": True}, ["stage 1 (vocoder)", "only first stages"]),
        ("runtime.enabled", False, ["runtime.enabled: false is not supported"]),
        ("stage_args.0.output_connectors", {"to_stage_1": "bog"}, ["connector 'bog'", "did you mean 'big'"]),
        ("runtime.edges.0.window_size", 8, ["edge 0 -> 1", "reads whole results only; remove window_size"]),
        ("runtime.edges.0.from", 1, ["runtime.edges 1 -> 1"]),
        ("runtime.edges", [{"from": 0, "to": 1}] * 2, ["runtime.edges: 0 -> 1 is given twice"]),
        ("stage_args.1.engine_input_source", [0, 0], ["engine_input_source names stage 0 twice"]),
        (
            "stage_args.1.final_output_type",
            "speech",
            ["stage 1 (vocoder)", "'speech' is not one of text, audio"],
        ),
        ("stage_args.1.custom_process_input_func", "os.getcwd", ["os.getcwd is no class that extends StageInput"]),
        ("stage_args.1.custom_process_input_func", "collections.Counter", ["Counter is no class that extends"]),
        ("stage_args.0.custom_prompt_func", "os.sep", ["custom_prompt_func: os.sep is no class that extends Prompt"]),
        ("stage_args.1.input_connectors", {"from_stage_7": "big"}, ["no edge 'from_stage_7'", "has from_stage_0"]),
        ("runtime.connectors.small", {"name": "InlineConnector"}, ["connectors.small: no edge uses it; name it in"]),
        ("runtime.connectors.big.extra", {"shm_threshold_byte": 1}, ["did you mean 'shm_threshold_bytes'"]),
        ("stage_args", [], ["stage_args: is empty"]),
        ("stage_args.0.stage_id", -1, ["stage 'thinker': stage_args[0].stage_id: Expected `int` >= 0, not -1"]),
        ("stage_args.1.sample_rate", 0, ["stage 'vocoder': stage_args[1].sample_rate: Expected `int` >= 1, not 0"]),
        (
            "stage_args.0.runtime.step_timeout_s",
            nan,
            ["stage 'thinker': ", "step_timeout_s: Expected `float` >= 0.0"],
        ),
        ("stage_args.0.runtime.step_timeout_s", inf, ["step_timeout_s: Expected `float` <= 1000000000.0, not inf"]),
        ("stage_args.0.runtime.resources", {"CPU": nan}, ["stage 0 (thinker): runtime.resources: CPU is nan"]),
        (
            "stage_args.0.engine_type",
            "ar",
            ["engine_type: Invalid enum value 'ar' (known here: AR, DiT, fake, function"],
        ),
        ("runtime.encrypt", "some", ["runtime.encrypt: Invalid enum value 'some' (known here: all, control)"]),
        ("runtime.request_timeout_s", "1 h", ["runtime.request_timeout_s: Expected `float`, got `str` '1 h'"]),
        ("runtime.restart", {"window_s": -1}, ["runtime.restart.window_s: Expected `float` >= 0.0, not -1"]),
        ("runtime.edges.0.window_growth", nan, ["runtime.edges[0].window_growth: Expected `float` > 1.0, not nan"]),
        ("runtime.connectors.big.extra", {"shm_threshold_bytes": -1}, ["Expected `int` >= 0"]),
    ],
)
def test_errors_name_key_and_remedy(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(StageConfigError) as error:
        parse_pipeline_config(change(valid(), path, value), "my.yaml")
    assert str(error.value).startswith("my.yaml: ")
    for word in words:
        assert word in str(error.value)


CHECKED_LATER = {
    ("stage_args", "runtime", "replicas"), ("stage_args", "engine_input_source"), ("stage_args", "runtime", "memory"),
    ("stage_args", "runtime", "devices"), ("stage_args", "runtime", "cpus"), ("stage_args", "runtime", "resources"),
    ("runtime", "defaults", "window_size"),
    *(("runtime", "edges", key) for key in ("from", "to", "window_size", "first_window_size")),
    *(("runtime", "edges", key) for key in ("left_context", "right_context")),
}  # fmt: skip
"""Numbers whose range depends on other keys, or that are written with units, too."""


def test_every_number_has_a_range() -> None:
    found = dict(numbers(msgspec.inspect.type_info(PipelineConfig)))
    assert {path for path, has_range in found.items() if not has_range} == CHECKED_LATER
    assert len(found) > len(CHECKED_LATER) + 15


def numbers(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The numbers below a type: their keys, and whether there is a least value."""
    if isinstance(node, msgspec.inspect.StructType):
        for field in node.fields:
            yield from numbers(field.type, (*path, field.encode_name))
    elif isinstance(node, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        yield path, node.ge is not None or node.gt is not None
    for inner in (*getattr(node, "types", ()), getattr(node, "item_type", None), getattr(node, "value_type", None)):
        if inner is not None:
            yield from numbers(inner, path)


@pytest.mark.parametrize(
    ("edge", "words"),
    [({"first_window_size": 0}, "first_window_size 0 is neither"), ({"window_growth": 0}, "> 1.0, not 0")],
)
def test_zero_is_not_the_default(edge: dict[str, Any], words: str) -> None:
    with pytest.raises(StageConfigError, match=words):
        sentences({"window_size": 3, **edge}, {}, {})


def test_a_pipeline_without_output_is_refused() -> None:
    raw = valid()
    for stage in raw["stage_args"]:
        stage["final_output"] = False
    with pytest.raises(StageConfigError, match="no stage has final_output: true"):
        parse_pipeline_config(raw, "f")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a: [", "is not YAML"),
        (b"- 1", "must be a mapping"),
        ("stage_args: []".encode("utf-16"), r"broken.yaml: is not UTF-8 \(byte 0\); save it in this encoding"),
        ("stage_args: [] # \xe9".encode("latin-1"), r"is not UTF-8 \(byte 17\)"),
        (b"[" * 5000, "is nested too deeply"),
        (b"runtime: {}\nstage_args: []\nruntime: {}", r"(?s)'runtime' is given twice; remove one of them.*line 3"),
        (b"stage_args:\n- {stage_id: 0, stage_id: 1}", r"(?s)'stage_id' is given twice.*line 2"),
    ],
)
def test_an_unreadable_file(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(text)
    with pytest.raises(StageConfigError, match=words):
        load_pipeline_config(path)
    with pytest.raises(StageConfigError, match="cannot be read"):
        load_pipeline_config(tmp_path / "absent.yaml")


def test_an_error_for_an_unknown_stage_lists_the_stages() -> None:
    with pytest.raises(StageConfigError, match=r"no stage 'talker'.*'thinker' \(0\), 'vocoder' \(1\)"):
        find_stage(parse_pipeline_config(valid(), "f"), "talker")


def test_a_hint_is_near_and_another_name() -> None:
    assert nearest("max_modellen", ["max_model_len", "master_addr"]) == "; did you mean 'max_model_len'?"
    assert nearest("temperature", ["max_model_len", "master_addr"]) == nearest("audio", ["audio"]) == ""


def test_keys_that_a_mapping_merges_may_be_given_again(tmp_path: Path) -> None:
    stage = "{stage_id: 0, engine_type: fake, final_output: true, final_output_type: text}"
    path = tmp_path / "merged.yaml"
    path.write_text(f"stage_args:\n- &first {stage}\n- {{<<: *first, stage_id: 1}}\n")
    assert [stage.final_output_type for stage in load_pipeline_config(path).stage_args] == ["text", "text"]


def sentences(edge: dict[str, Any], source: dict[str, Any], target: dict[str, Any]) -> PipelineConfig:
    stages = [
        {"stage_id": 0, "engine_type": "fake", **source},
        {"stage_id": 1, "engine_type": "fake", "engine_input_source": [0], **target},
    ]
    stages[1] |= {"final_output": True, "final_output_type": "audio"}
    edges = [{"from": 0, "to": 1, "unit": "sentences", **edge}]
    runtime = {"edges": edges, "defaults": {"window_size": 7}}
    return parse_pipeline_config({"stage_args": stages, "runtime": runtime}, "f")


def test_windows_of_sentences() -> None:
    window = sentences({}, {}, {}).window(0, 1, None)
    assert (window.window_size, window.first_is_clause, window.left_context) == (1, True, 0)
    config = sentences({"window_size": 3, "first_window_size": 2}, {"engine_type": "AR"}, {"reads": ["completions"]})
    window = config.window(0, 1, None)
    assert (window.window_size, window.first_window_size, window.first_is_clause) == (3, 2, False)
    assert not sentences({"window_size": -1}, {}, {}).window(0, 1, None).streams


@pytest.mark.parametrize(
    ("edge", "source", "target", "words"),
    [
        ({"left_context": 1}, {}, {}, "left_context 1: sentences have none; remove it"),
        ({"right_context": 2}, {}, {}, "right_context 2: sentences have none; remove it"),
        ({"first_window_size": -2}, {}, {}, "first_window_size -2 is neither"),
        (
            {},
            {"engine_type": "AR", "engine_args": {"engine_output_type": "codes"}},
            {},
            "stage 0 .stage0. gives no text",
        ),
        ({}, {"final_output": True, "final_output_type": "image"}, {}, "stage 0 .stage0. gives no text"),
        ({"unit": "sentence"}, {"engine_type": "AR"}, {}, "unit 'sentence' is not one of sentences, tokens; did you"),
        ({}, {}, {"reads": ["tensors.rows"]}, "stage 1 .stage1. does not read completions; add it to reads"),
        ({}, {}, {"custom_process_input_func": PROCESSOR}, "reads whole results only"),
        ({}, {}, {"custom_process_input_func": f"{__name__}.ReadsTokens"}, "ReadsTokens reads windows of tokens"),
    ],
)
def test_senseless_windows_of_sentences(
    edge: dict[str, Any], source: dict[str, Any], target: dict[str, Any], words: str
) -> None:
    with pytest.raises(StageConfigError, match=f"f: edge 0 -> 1: .*{words}"):
        sentences(edge, source, target)


class ReadsTokens(StageInputProcessor):
    window = WindowConfig(unit="tokens", left_context=1)

    def process(self, request: StageRequest, sources: Mapping[int, StageOutput]) -> StageInput | None:
        return None
