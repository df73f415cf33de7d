# SPDX-License-Identifier: Apache-2.0
"""Threads of a pipeline on a CPU as users have it, without `OMP_NUM_THREADS`."""

import os
from pathlib import Path

import pytest
import torch
from vllm import envs

from tests.entrypoints.conftest import start
from vllm_omni import OmniLLM
from vllm_omni.testing.tiny.qwen3_omni_moe import Size, write

PROMPT = "<|im_start|>user\na hen and a fox<|im_end|>\n<|im_start|>assistant\n"


def answer(llm: OmniLLM) -> list[int]:
    """What the thinker writes, while nobody is spoken to."""
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    (output,) = llm.generate([{"prompt": PROMPT, "modalities": ["text"]}], [greedy, None, None], use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.slow
def test_a_stage_that_is_busy_alone_computes_with_the_cores_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, Size(expert_hidden=768))  # 40 MB in the thinker: worth a second thread.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # Functions are sent to the stages.
    envs.disable_envs_cache()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    found = []
    for threads in ("1", None):
        if threads is None:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with start(tmp_path, max_model_len=512) as llm:
            found.append(answer(llm))
            thinker, *_ = llm.apply_model(lambda model: torch.get_num_threads())
            assert thinker == (1 if threads else 2)
    assert found[0] == found[1] and len(found[0]) == 16
