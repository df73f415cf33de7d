# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of an `OmniLLM`: methods of vLLM's `LLM`."""

import json
from pathlib import Path

import pytest

from tests.entrypoints.fake_pipelines import quick_servers
from vllm_omni import OmniLLM
from vllm_omni.errors import InvalidControlError

PARAMS = {"temperature": 0.0, "max_tokens": 4}


@pytest.mark.slow
def test_a_profiler_writes_the_trace_of_each_stage(tiny_qwen3: Path, tmp_path: Path) -> None:
    profiler = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_use_gzip": False}
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24}
    with quick_servers(), OmniLLM(str(tiny_qwen3), **arguments, profiler_config=profiler) as llm:
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
