# SPDX-License-Identifier: Apache-2.0
"""Which arguments reach which stage, and what is checked before a stage starts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.diffusion.indexes import write_index
from tests.hub_cache import NAME, HubCache
from vllm_omni import OmniLLM
from vllm_omni.config.loader import parse_pipeline_config
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.engine.engine_args import HAS_INT8_PRODUCTS, OmniEngineSettings
from vllm_omni.entrypoints import resolve
from vllm_omni.entrypoints.request_builder import RequestBuilder
from vllm_omni.entrypoints.resolve import (
    apply_arguments,
    has_vllm_stages,
    read_pipeline,
    resolve_checkpoints,
    resolve_pipeline,
)
from vllm_omni.errors import StageConfigError
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor
from vllm_omni.model_packages import InstalledModels, ModelPackage
from vllm_omni_talk import weights, whisper

PROCESSOR = "tests.diffusion.rewriting.RewrittenPrompt"


def pipeline(writer: dict[str, Any] | None = None, dit: dict[str, Any] | None = None) -> PipelineConfig:
    """An AR stage and a diffusion stage, with these engine arguments."""
    stages = [
        {"stage_id": 0, "engine_type": "AR", "engine_args": {"model_stage": "writer", **(writer or {})}},
        {
            "stage_id": 1,
            "engine_type": "DiT",
            "engine_args": {"model_stage": "dit", **(dit or {})},
            "engine_input_source": [0],
            "custom_process_input_func": PROCESSOR,
            "final_output": True,
            "final_output_type": "image",
        },
    ]
    return parse_pipeline_config({"stage_args": stages}, "this test")


def test_an_engine_argument_reaches_every_stage_that_has_it() -> None:
    given = {"dtype": "float32", "max_model_len": 64, "vae_tiling": True}

    writer, dit = apply_arguments(pipeline(dit={"dtype": "bfloat16"}), given, {}).stage_args

    assert writer.vllm_engine_args["max_model_len"] == 64 and "vae_tiling" not in writer.engine_args
    assert dit.engine_args == {"model_stage": "dit", "dtype": "float32", "vae_tiling": True}


def test_an_override_is_for_one_stage_and_wins() -> None:
    config = apply_arguments(pipeline(), {"dtype": "float32"}, {"dit": {"dtype": "float16"}, 0: {"seed": 4}})

    writer, dit = config.stage_args
    assert (writer.engine_args["dtype"], writer.engine_args["seed"]) == ("float32", 4)
    assert dit.engine_args == {"model_stage": "dit", "dtype": "float16"}


def test_overrides_of_runtime_and_sampling_defaults() -> None:
    override = {"runtime": {"memory": 0.5}, "default_sampling_params": {"temperature": 0.0}, "seed": 4}

    config = apply_arguments(pipeline({"gpu_memory_utilization": 0.9}), {"dtype": "float32"}, {"writer": override})

    writer, dit = config.stage_args
    assert writer.runtime.memory == 0.5 and "gpu_memory_utilization" not in writer.engine_args
    assert writer.default_sampling_params == {"temperature": 0.0} and writer.engine_args["seed"] == 4
    assert dit.runtime.memory is None


def test_gpu_memory_utilization_wins_over_the_memory_of_the_file() -> None:
    with_memory = apply_arguments(pipeline(), {}, {"writer": {"runtime": {"memory": 0.5}}})
    for arguments in (({"gpu_memory_utilization": 0.3}, {}), ({}, {"writer": {"gpu_memory_utilization": 0.3}})):
        assert apply_arguments(with_memory, *arguments).stage_args[0].engine_args["gpu_memory_utilization"] == 0.3


def test_a_wrong_override_is_refused() -> None:
    with pytest.raises(StageConfigError, match=r"stage 0 \(writer\): runtime\.devices '0,0' names a device twice"):
        apply_arguments(pipeline(), {}, {"writer": {"runtime": {"devices": "0,0"}}})
    with pytest.raises(StageConfigError, match="override for stage writer: 3 is not a mapping"):
        apply_arguments(pipeline(), {}, {"writer": 3})  # type: ignore[dict-item]


def test_an_argument_that_no_stage_has_is_refused() -> None:
    with pytest.raises(StageConfigError, match="engine argument 'vae_tilling'; did you mean 'vae_tiling'"):
        apply_arguments(pipeline(), {"vae_tilling": True}, {})
    with pytest.raises(StageConfigError, match="no stage 'dti'"):
        apply_arguments(pipeline(), {}, {"dti": {}})


def test_workers_of_ray_need_a_cluster(tiny_qwen3: Path) -> None:
    arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    with pytest.raises(StageConfigError, match=r"stage 0 \(text\): .* set distributed_backend to ray, too"):
        resolve_pipeline(OmniArgs(model=str(tiny_qwen3), engine_args=arguments))


def test_a_stages_own_checkpoint_is_searched_in_the_pipelines_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("model/writer", "elsewhere/dit"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    model = str(tmp_path / "model")

    inside = resolve_checkpoints(pipeline({"model": "writer"}, {"model": "elsewhere/dit"}), model)
    assert [stage.checkpoint(model) for stage in inside.stage_args] == [
        str(tmp_path / "model/writer"),
        str(tmp_path / "elsewhere/dit"),
    ]
    assert "model" not in inside.stages[0].vllm_engine_args
    hub = resolve_checkpoints(pipeline(dit={"model": "organization/dit"}), model)
    assert [stage.checkpoint(model) for stage in hub.stage_args] == [model, "organization/dit"]


def test_a_checkpoint_brings_its_own_stage_configuration(tmp_path: Path) -> None:
    write_index(tmp_path, "ZImagePipeline")
    own = tmp_path / "stage_config.yaml"
    own.write_text(
        "stage_args:\n- {stage_id: 0, engine_type: DiT, engine_args: {model_stage: painter}, final_output: true, "
        "final_output_type: image, default_sampling_params: {height: 96}}\n"
    )

    read = read_pipeline(OmniArgs(model=str(tmp_path)))

    assert read.source == own
    (stage,) = read.loaded.stage_args
    assert (stage.name, stage.default_sampling_params) == ("painter", {"height": 96})


def write_own_configuration(folder: Path, **engine_args: Any) -> Path:
    """A diffusers checkpoint whose own stage configuration sets these."""
    write_index(folder, "ZImagePipeline")
    stage = {"stage_id": 0, "engine_type": "DiT", "engine_args": engine_args, "final_output": True}
    file = folder / "stage_config.yaml"
    file.write_text(yaml.safe_dump({"stage_args": [stage | {"final_output_type": "image"}]}))
    return file


def test_only_the_operator_lets_a_checkpoint_set_more_than_its_pipeline(tmp_path: Path) -> None:
    file, model = write_own_configuration(tmp_path, use_safetensors=False), str(tmp_path)

    for attempt in (read_pipeline, resolve_pipeline, has_vllm_stages):
        with pytest.raises(StageConfigError, match=rf"{file}: stage 0 .*: engine_args\.use_safetensors: "):
            attempt(OmniArgs(model=model))
        with pytest.raises(StageConfigError, match="use_safetensors"):  # trust in a stage is trust in its model
            attempt(OmniArgs(model=model, stage_overrides={0: {"trust_remote_code": True}}))
    for trusted in (
        OmniArgs(model=model, engine_args={"trust_remote_code": True}),
        OmniArgs(model=model, stage_configs_path=str(file)),
    ):
        assert read_pipeline(trusted).loaded.stages[0].engine_args["use_safetensors"] is False


def test_a_diffusers_pipeline_has_the_stage_configuration_of_its_class(tmp_path: Path) -> None:
    folder = Path(write_index(tmp_path, "GlmImagePipeline"))
    for name in ("vision_language_encoder", "processor"):
        (folder / name).mkdir()

    read = read_pipeline(OmniArgs(model=str(folder)))

    assert read.source == stage_configs_dir() / "glm_image.yaml"
    prior, dit = read.with_checkpoints.stage_args
    assert prior.checkpoint("") == str(folder / "vision_language_encoder")
    assert prior.engine_args["tokenizer"] == str(folder / "processor")
    assert dit.checkpoint(str(folder)) == str(folder)
    assert read_pipeline(OmniArgs(model=write_index(tmp_path, "ZImagePipeline"))).source is None


def test_a_stages_own_checkpoint_is_a_folder_of_one_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "checkpoint"
    for name in ("writer", "words"):
        (checkpoint / name).mkdir(parents=True)
        (checkpoint / name / "config.json").write_text("{}")
    cache = HubCache(tmp_path / "cache", monkeypatch)
    cache.add(checkpoint, "main")
    second = cache.add(checkpoint, "v2")
    config = pipeline({"model": "writer", "tokenizer": "words", "revision": "v2"}, {"model": "organization/dit"})

    writer, dit = resolve_checkpoints(config, NAME).stage_args

    assert writer.engine_args["model"] == str((second / "writer").resolve())
    assert writer.engine_args["tokenizer"] == str((second / "words").resolve())
    assert dit.checkpoint(NAME) == "organization/dit"
    elsewhere = resolve_checkpoints(pipeline({"model": "no_folder", "tokenizer": "bert"}), NAME).stage_args[0]
    assert (elsewhere.engine_args["model"], elsewhere.engine_args["tokenizer"]) == ("no_folder", "bert")


def test_weights_of_a_folder_on_the_hub_are_downloaded_when_a_pipeline_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[dict[str, Any]] = []

    def download(name: str, **arguments: Any) -> str:
        downloads.append({"name": name, **arguments})
        return "/hub"

    monkeypatch.setattr(resolve, "snapshot_download", download)
    given = pipeline({"model": "writer"}, {"model": "organization/dit"})
    monkeypatch.setattr(Path, "exists", lambda path: str(path).startswith("/hub"))
    found = resolve_checkpoints(given, NAME)
    assert [each["allow_patterns"] for each in downloads] == ["writer/*"]
    assert "writer/*.safetensors" in downloads.pop()["ignore_patterns"]

    resolve.fetch_weights(resolve.ReadPipeline(None, given, given, found), NAME)

    assert downloads == [{"name": NAME, "revision": None, "allow_patterns": "writer/*", "ignore_patterns": []}]


def test_a_checkpoint_of_the_package_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (Path(OmniArgs(model="shapes").model) / "config.json").is_file()
    assert OmniArgs(model="someone/shapes").model == "someone/shapes"
    (tmp_path / "shapes").mkdir()
    assert (Path(OmniArgs(model="shapes").model) / "config.json").is_file(), "a folder hides no shipped model"
    assert OmniArgs(model="./shapes").model == "./shapes"


def test_a_checkpoint_that_a_package_makes_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ModelPackage(made_checkpoints={"made": f"{__name__}:make_checkpoint"})
    monkeypatch.setattr(resolve, "find_models", lambda: InstalledModels({"ours": made}, {}))
    calls.clear()
    config = pipeline({"model": "made"})

    found = resolve_checkpoints(config, str(tmp_path))
    assert found.stage_args[0].engine_args["model"] == "/made" and calls == [False], "only a start makes weights"
    resolve.fetch_weights(resolve.ReadPipeline(None, config, config, found), str(tmp_path))
    assert calls == [False, True]

    (tmp_path / "made").mkdir()
    found = resolve_checkpoints(config, str(tmp_path))
    own = found.stage_args[0].engine_args["model"]
    assert own == str(tmp_path / "made"), "the pipeline's own folder is first"
    resolve.fetch_weights(resolve.ReadPipeline(None, config, config, found), str(tmp_path))
    assert calls == [False, True]


calls: list[bool] = []


def make_checkpoint(with_weights: bool) -> str:
    calls.append(with_weights)
    return "/made"


def test_a_shipped_pipeline_is_trusted_and_makes_nothing_that_is_replaced(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hibari", reason="the extra talk is not installed")
    for module, name in ((weights, "language_model"), (whisper, "tiny_english")):
        monkeypatch.setattr(module, name, lambda with_weights: pytest.fail("it was made"))
    replaced: dict[str | int, dict[str, Any]] = {
        "llm": {"model": str(tiny_qwen3)},
        "asr": {"function": "vllm_omni_talk.recognizer.Recognizer"},
    }

    resolved = resolve_pipeline(OmniArgs(model="talk", stage_overrides=replaced))

    assert [stage.name for stage in resolved.config.stage_args] == ["asr", "llm", "tts"]
    (args,) = resolved.engine_args
    assert args.model == str(tiny_qwen3)
    chosen = OmniEngineSettings.from_vllm_config(args).int8_weights
    assert chosen == ("auto" if HAS_INT8_PRODUCTS else None)
    replaced["llm"]["quantization"] = None
    (args,) = resolve_pipeline(OmniArgs(model="talk", stage_overrides=replaced)).engine_args
    assert OmniEngineSettings.from_vllm_config(args).int8_weights is None


@pytest.fixture
def short_checkpoint(tiny_qwen3_omni_moe: Path, tmp_path: Path) -> str:
    """A thinker of 1024 positions, and a talker of 512: less than the shipped configuration has."""
    folder = shutil.copytree(tiny_qwen3_omni_moe, tmp_path / "short", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    for part, length in (("thinker_config", 1024), ("talker_config", 512)):
        config[part]["text_config"]["max_position_embeddings"] = length
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def lengths(args: OmniArgs) -> list[int | None]:
    return [stage.engine_args.get("max_model_len") for stage in read_pipeline(args).with_checkpoints.stage_args]


def test_shipped_lengths_are_upper_bounds(short_checkpoint: str) -> None:
    assert lengths(OmniArgs(model=short_checkpoint)) == [1024, 512, None]
    variant = OmniArgs(model=short_checkpoint, stage_configs_path="qwen3_omni_moe_2x80gb")
    assert lengths(variant)[:2] == [1024, 512]
    lower = OmniArgs(model=short_checkpoint, stage_overrides={"thinker": {"max_model_len": 64}})
    assert lengths(lower) == [64, 512, None]
    assert resolve_pipeline(OmniArgs(model=short_checkpoint)).engine_args[1].max_model_len == 512


def test_an_operators_length_that_the_checkpoint_does_not_have_is_refused(
    short_checkpoint: str, tmp_path: Path, tiny_qwen3: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text((stage_configs_dir() / "qwen3_omni_moe.yaml").read_text())
    thinker = r"^stage 0 \(thinker\): max_model_len {} .* at most 1024, .* --stage\.thinker\.max_model_len$"
    for given, message in (
        ({"engine_args": {"max_model_len": 2048}}, thinker.format(2048)),
        ({"stage_configs_path": str(file)}, thinker.format(16384)),
        ({"stage_overrides": {1: {"engine_args": {"max_model_len": 513}}}}, r"stage 1 \(talker\): .* 513 .* most 512"),
    ):
        with pytest.raises(StageConfigError, match=message):
            read_pipeline(OmniArgs(model=short_checkpoint, **given))  # type: ignore[arg-type]
    with pytest.raises(StageConfigError, match=r"stage 0 \(text\): max_model_len 99999 .* at most 8192"):
        read_pipeline(OmniArgs(model=str(tiny_qwen3), engine_args={"max_model_len": 99999}))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '"qwen3"',
        '{"model_type": "qwen3", "hidden_size": "x", "architectures": ["Qwen3ForCausalLM"]}',
        '{"model_type": "qwen3_omni_moe", "thinker_config": [1]}',
    ],
)
@pytest.mark.usefixtures("without_retries")
def test_a_configuration_of_the_checkpoint_with_other_types(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StageConfigError, match=re.escape(f"{tmp_path}: the checkpoint's config.json cannot be read: ")):
        read_pipeline(OmniArgs(model=str(tmp_path)))


def test_a_wrong_configuration_of_vllms_is_one_line(tiny_qwen3: Path) -> None:
    arguments = {"structured_outputs_config": {"backend": "nothing"}}
    with pytest.raises(
        StageConfigError,
        match=r"^stage 0 \(text\): engine_args: \w+\.backend: 'nothing' must be .*$",
    ):
        resolve_pipeline(OmniArgs(model=str(tiny_qwen3), engine_args=arguments))


@pytest.mark.parametrize("model", ["/no/where", "./dit", "a/b/c", "~nobody-of-this-name/dit"])
def test_a_stages_own_checkpoint_must_exist(model: str) -> None:
    with pytest.raises(StageConfigError, match=rf"stage 1 \(dit\): engine_args\.model: there is no '{model}'"):
        resolve_checkpoints(pipeline(dit={"model": model}), "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_stepz": 3}, ["'max_stepz'", "did you mean 'max_steps'"]),
        ({"max_model_len": 3}, ["no stage of this pipeline has an engine argument 'max_model_len'"]),
        ({"dtype": "float8"}, ["dtype", "float8"]),
        ({"stage_overrides": {"diffusion": {"max_stepz": 3}}}, ["stage 0 (diffusion)", "did you mean 'max_steps'"]),
        ({"stage_overrides": {"diffusion": {"max_steps": 0}}}, ["stage 0 (diffusion)", "max_steps"]),
        ({"stage_overrides": {"thinker": {}}}, ["no stage 'thinker'", "'diffusion' (0)"]),
        ({"pipeline_class": "ZImagPipeline"}, ["did you mean 'ZImagePipeline'"]),
    ],
)
def test_wrong_arguments_of_a_diffusers_model(tmp_path: Path, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(StageConfigError) as error:
        OmniLLM(write_index(tmp_path, "ZImagePipeline"), **arguments)
    assert [word for word in words if word not in str(error.value)] == []


def test_voices_are_those_of_the_revision(
    tiny_qwen2_5_omni: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = HubCache(tmp_path, monkeypatch)
    cache.add(tiny_qwen2_5_omni, "main")
    file = cache.add(tiny_qwen2_5_omni, "v2") / "spk_dict.pt"
    (voice, *_) = torch.load(file, weights_only=True).values()
    torch.save({"Ada": voice}, file)
    engine_args = {"revision": "v2", "max_model_len": 2048, "dtype": "float32"}

    resolved = resolve_pipeline(OmniArgs(model=NAME, engine_args=engine_args))

    assert RequestBuilder(resolved.config, NAME).voices == ["ada"]
    for stage in resolved.config.stage_args[1:]:
        processor = load_stage_input_processor(stage, NAME)  # as in the stage's process
        assert processor is not None and processor.voices in (("ada",), ())
