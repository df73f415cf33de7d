# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of an `OmniLLM`: methods of vLLM's `LLM`."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from vllm import EngineArgs, envs
from vllm.config import ProfilerConfig
from vllm.v1.metrics.reader import Counter

from tests.entrypoints.fake_pipelines import make_pipeline, running
from tests.entrypoints.spoken_functions import EDITING, THINKING
from tests.model_executor.tiny_speech import write_vits
from tests.orchestrator.pipelines import fake_stage
from tests.orchestrator.test_failure import wait_until
from vllm_omni import OmniLLM
from vllm_omni.errors import ControlError, InvalidControlError, StageConfigError

PARAMS = {"temperature": 0.0, "max_tokens": 4}


@pytest.mark.slow
def test_a_profiler_writes_the_trace_of_each_stage(tiny_qwen3: Path, tmp_path: Path) -> None:
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_use_gzip": False}
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24}
    with OmniLLM(str(tiny_qwen3), **arguments, profiler_config=profiler) as llm:
        (expected,) = llm.generate("a hen", [PARAMS], use_tqdm=False)
        llm.start_profile("mine")
        (output,) = llm.generate("a hen", [PARAMS], use_tqdm=False)
        llm.stop_profile()
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        check_trace(tmp_path, "mine_stage0*.json")

        with pytest.raises(InvalidControlError, match=r"sleep: the memory of stage 0"):
            llm.sleep()
        assert not llm.is_sleeping()
        llm.sleep(level=0)
        assert llm.is_sleeping() and llm.wake_up(["scheduling"]) and not llm.is_sleeping()
        with pytest.raises(InvalidControlError, match="mode: 'later' is not one of abort, wait, keep"):
            llm.pause_generation(mode="later")  # type: ignore[arg-type]


def check_trace(folder: Path, pattern: str, operation: str = "aten::") -> None:
    (trace,) = folder.glob(pattern)
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(operation in name for name in names)


@pytest.mark.slow
def test_each_process_writes_a_trace(tmp_path: Path) -> None:
    """A function computes on its engine's thread, a `FunctionStage` and a model of transformers on others."""
    write_vits(tmp_path / "model")
    engine_args = {"model_stage": "voice", "model": str(tmp_path / "model")}
    voice = fake_stage(2, "voice", (1,), "audio") | {"engine_type": "transformers", "engine_args": engine_args}
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_use_gzip": False}
    operations = {0: "aten::sum", 1: "aten::prod", 2: "aten::conv1d"}
    stages = (THINKING, EDITING, voice)
    with pytest.raises(StageConfigError, match=r"stage 0 \(thinker\): engine_args.profiler_config"):
        make_pipeline(OmniLLM, tmp_path / "stages.yaml", stages, args={"profiler_config": {"profiler": "torch"}})
    with running(OmniLLM, tmp_path, stages, {"profiler_config": profiler}) as llm:

        def speak() -> torch.Tensor:
            (output,) = llm.generate("it is late.", [None, None, {"seed": 1}], use_tqdm=False)
            return output.multimodal_output["audio"]

        expected = speak()
        for prefix in ("mine", "other"):
            llm.start_profile(prefix)
            assert torch.equal(speak(), expected)
            llm.stop_profile()
            for stage_id, operation in operations.items():
                check_trace(tmp_path, f"{prefix}_stage{stage_id}*.json", operation)
        llm.start_profile("limited", max_iterations=1)
        for _ in range(3):
            speak()
        for stage_id, operation in operations.items():
            check_trace(tmp_path, f"limited_stage{stage_id}*.json", operation)  # One step more has ended it.


@pytest.mark.slow
def test_a_profiler_of_one_stage(tmp_path: Path) -> None:
    """The others have none."""
    stages = (THINKING, EDITING | {"final_output": True, "final_output_type": "text"})
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    with running(OmniLLM, tmp_path, stages) as llm, pytest.raises(InvalidControlError, match="no stage has a profiler"):
        llm.start_profile()
    overrides = {"editor": {"profiler_config": profiler}}
    with running(OmniLLM, tmp_path, stages, {"stage_overrides": overrides}) as llm:
        llm.start_profile()
        llm.generate("it is late.", use_tqdm=False)
        llm.stop_profile()
        assert [trace.name.partition(".")[0] for trace in tmp_path.glob("*.json.gz")] == ["stage1"]


@pytest.mark.slow
def test_diffusion_has_a_profiler(tiny_diffusion: Callable[[str], Path], tmp_path: Path) -> None:
    model = str(tiny_diffusion("z_image"))
    params = {"height": 32, "width": 32, "num_inference_steps": 2, "seed": 1}
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_use_gzip": False}
    with pytest.raises(StageConfigError, match="profiler_config"):
        OmniLLM(model, profiler_config={"profiler": "torch"})
    with OmniLLM(model, profiler_config=profiler) as llm:
        (expected,) = llm.generate("a hen", [params], use_tqdm=False)
        with pytest.raises(InvalidControlError, match="profile_prefix must be"):
            llm.start_profile("../mine")
        for prefix in ("mine", "other"):
            llm.start_profile(prefix)
            (output,) = llm.generate("a hen", [params], use_tqdm=False)
            llm.stop_profile()
            check_trace(tmp_path, f"{prefix}_stage0*.json")
            assert output.images[0].tobytes() == expected.images[0].tobytes()
        llm.start_profile("limited", max_iterations=1)
        for _ in range(2):
            llm.generate("a hen", [params], use_tqdm=False)
        check_trace(tmp_path, "limited_stage0*.json")  # One step more has ended it.


@pytest.mark.slow
def test_a_pipeline_of_vllms_engine_arguments(tiny_qwen3: Path, tmp_path: Path) -> None:
    """Those at their defaults do not count. Its models can be called, and its engine's metrics read."""
    profiler = ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path))
    arguments = EngineArgs(
        str(tiny_qwen3),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 24,
        profiler_config=profiler,
    )
    envs.disable_envs_cache()
    with mock.patch.dict(os.environ, VLLM_ALLOW_INSECURE_SERIALIZATION="1"):
        with OmniLLM.from_engine_args(arguments) as llm:
            given = {"dtype", "enforce_eager", "max_model_len", "kv_cache_memory_bytes", "profiler_config"}
            assert given <= llm.config.stages[0].engine_args.keys()
            assert not {"seed", "tensor_parallel_size"} & llm.config.stages[0].engine_args.keys()
            assert llm.apply_model(lambda model: len(model.model.layers)) == [4]
            assert llm.collective_rpc(lambda worker, factor: factor * worker.rank, args=(2,)) == [0]
            with pytest.raises(InvalidControlError, match=r"stage 0 \(text\): no layers"):
                llm.apply_model(_refuse)
            assert llm.apply_model(lambda model: {"shape": (2, 3), "dtype": model.lm_head.weight.dtype}) == [
                {"shape": [2, 3], "dtype": "torch.float32"}
            ]
            for result in (1 << 70, "\ud800"):  # No message can have them.
                with pytest.raises(ControlError, match=r"stage 0 \(text\): "):
                    llm.collective_rpc(lambda worker, result=result: result)
            assert llm.generate("a hen", [PARAMS], use_tqdm=False)
        with OmniLLM(str(tiny_qwen3), dtype="float32", enforce_eager=True, max_model_len=256, log_stats=True) as llm:
            llm.generate("a hen", [PARAMS], use_tqdm=False)
            wait_until(lambda: counted_tokens(llm) == {"text": PARAMS["max_tokens"]})


def counted_tokens(llm: OmniLLM) -> dict[str, int]:
    """By stage."""
    counters = [it for it in llm.get_metrics() if it.name == "vllm:generation_tokens"]
    return {it.labels["stage"]: it.value for it in counters if isinstance(it, Counter)}


def _refuse(model: object) -> None:
    raise ValueError("no layers \ud800")
