# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of an `OmniLLM`: methods of vLLM's `LLM`."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
from vllm import EngineArgs, envs
from vllm.config import ProfilerConfig
from vllm.v1.metrics.reader import Counter

from tests.orchestrator.test_failure import wait_until
from vllm_omni import OmniLLM
from vllm_omni.errors import ControlError, InvalidControlError

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
        (trace,) = tmp_path.glob("mine_stage0*.json")
        names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
        assert any(name.startswith("aten::") for name in names)

        with pytest.raises(InvalidControlError, match=r"sleep: the memory of stage 0"):
            llm.sleep()
        assert not llm.is_sleeping()
        llm.sleep(level=0)
        assert llm.is_sleeping() and llm.wake_up(["scheduling"]) and not llm.is_sleeping()
        with pytest.raises(InvalidControlError, match="mode: 'later' is not one of abort, wait, keep"):
            llm.pause_generation(mode="later")  # type: ignore[arg-type]


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
