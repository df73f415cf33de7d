# SPDX-License-Identifier: Apache-2.0
"""Stages on one GPU keep their budgets, have the room that `doctor` computes, and are replaced when they are killed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.gpu.pipelines import LIMITS, assert_same, speak, used_mib
from vllm_omni import OmniLLM
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.entrypoints.cli.doctor_memory import Machine, MemoryPlanner
from vllm_omni.entrypoints.resolve import read_pipeline
from vllm_omni.testing.media import mixed_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BLOCK_SIZE = 16
BUDGETS_MIB = {"thinker": 4096, "talker": 3072, "code2wav": 2048}
CONTEXT_MIB = 1024
"""Of a process besides its budget, at most: CUDA's context, and libraries' code."""
RESTART_TIMEOUT_S = 180.0


class Budgeted(NamedTuple):
    """
    Attributes:
        before: MiB of the GPU in use before the pipeline started.
    """

    llm: OmniLLM
    args: OmniArgs
    before: int
    prompts: list[Any]


@pytest.fixture(scope="module")
def budgeted(tiny_qwen3_omni_moe: Path) -> Iterator[Budgeted]:
    overrides = {name: {"runtime": {"memory": f"{mib}MiB"}} for name, mib in BUDGETS_MIB.items()}
    before = used_mib()
    engine_args = {"dtype": "float32", "enforce_eager": True, "block_size": BLOCK_SIZE, **LIMITS}
    with OmniLLM(str(tiny_qwen3_omni_moe), stage_overrides=overrides, **engine_args) as llm:
        args = OmniArgs(model=str(tiny_qwen3_omni_moe), engine_args=engine_args, stage_overrides=overrides)
        yield Budgeted(llm, args, before, mixed_prompts(tiny_qwen3_omni_moe, 8))


def test_stages_keep_their_budgets(budgeted: Budgeted) -> None:
    for _ in range(3):
        speak(budgeted.llm, budgeted.prompts)
    used = used_mib() - budgeted.before
    assert used <= sum(BUDGETS_MIB.values()) + len(BUDGETS_MIB) * CONTEXT_MIB
    assert all(stage.kv_blocks_total > 0 for stage in budgeted.llm.stats() if stage.name != "code2wav")


def test_kv_caches_have_the_room_that_doctor_computes(budgeted: Budgeted) -> None:
    """Or more, since it counts on more activations and graphs; at most what the weights leave."""
    planner = MemoryPlanner(read_pipeline(budgeted.args).with_checkpoints, budgeted.args.model)
    plans = planner.plan(Machine("this GPU", (torch.cuda.mem_get_info()[1],))).stages
    for plan, stats in zip(plans[:2], budgeted.llm.stats()[:2], strict=True):
        assert plan.needs is not None and plan.budget is not None
        most = (plan.budget - plan.needs.weights) / plan.needs.kv_token
        assert 0 < plan.room <= stats.kv_blocks_total * BLOCK_SIZE <= most, (stats.name, plan)


@pytest.mark.parametrize("name", BUDGETS_MIB)
def test_a_killed_stage_is_replaced_and_its_memory_is_free_again(budgeted: Budgeted, name: str) -> None:
    expected = speak(budgeted.llm, budgeted.prompts)
    used = used_mib()
    index = list(BUDGETS_MIB).index(name)
    restarts = budgeted.llm.health()[index].num_restarts

    os.kill(process_of(budgeted.llm, index), signal.SIGKILL)
    wait_for_restart(budgeted.llm, index, restarts)

    assert_same(speak(budgeted.llm, budgeted.prompts), expected)
    assert used_mib() <= used + CONTEXT_MIB


def test_requests_of_a_killed_stage_fail_or_complete(budgeted: Budgeted) -> None:
    expected = speak(budgeted.llm, budgeted.prompts)
    restarts = budgeted.llm.health()[0].num_restarts
    events = budgeted.llm.generate(budgeted.prompts, stream=True, use_tqdm=False)
    next(events)
    os.kill(process_of(budgeted.llm, 0), signal.SIGKILL)
    ends = [event for event in events if event.is_terminal]
    assert len({event.request_id for event in ends}) == len(ends)
    wait_for_restart(budgeted.llm, 0, restarts)
    assert_same(speak(budgeted.llm, budgeted.prompts), expected)


def process_of(llm: OmniLLM, index: int) -> int:
    return llm._pipeline.orchestrator._supervisor.stages[index].process.pid


def wait_for_restart(llm: OmniLLM, index: int, restarts: int) -> None:
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    while (health := llm.health()[index]).num_restarts == restarts or health.state != "ready":
        assert time.monotonic() < deadline, health
        time.sleep(0.2)
