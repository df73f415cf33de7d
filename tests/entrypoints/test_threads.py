# SPDX-License-Identifier: Apache-2.0
"""Threads of a pipeline on a CPU as users have it, without `OMP_NUM_THREADS`."""

import os
from pathlib import Path

import pytest
import torch
from vllm import envs

from tests.entrypoints.conftest import start
from vllm_omni import OmniLLM
from vllm_omni.placement import cores

PROMPT = "<|im_start|>user\na hen and a fox<|im_end|>\n<|im_start|>assistant\n"


def answer(llm: OmniLLM) -> list[int]:
    """What the thinker writes, while nobody is spoken to."""
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    (output,) = llm.generate([{"prompt": PROMPT, "modalities": ["text"]}], [greedy, None, None], use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_stage_that_is_busy_alone_computes_with_the_cores_of_others(
    tiny_qwen3_omni_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_BYTES_PER_THREAD", 1 << 20)  # So that the tiny weights are worth several threads.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # Functions are sent to the stages.
    envs.disable_envs_cache()
    num_cores = len(os.sched_getaffinity(0))
    found = []
    for threads in ("1", None):
        if threads is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with start(tiny_qwen3_omni_moe, max_model_len=512) as llm:
            found.append(answer(llm))
            thinker, *_ = llm.apply_model(lambda model: torch.get_num_threads())
            assert thinker == (1 if threads else num_cores - (num_cores > 2))
    assert found[0] == found[1] and len(found[0]) == 16
