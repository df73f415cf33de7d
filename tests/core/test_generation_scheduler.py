# SPDX-License-Identifier: Apache-2.0
"""Which windows a step of a one-step stage takes, on the scheduler of a real engine."""

import time

import pytest
import torch
from vllm import SamplingParams

from tests.engine.hooked_models import register
from vllm_omni.core.sched.output import RequestWindow
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine

LIMIT = 64


@pytest.fixture(scope="module")
def engine(tiny_qwen3):
    from vllm_omni.engine.engine_args import create_engine_args

    register()
    arguments = {"model_arch": "DoublingVocoder", "max_model_len": LIMIT, "max_num_batched_tokens": LIMIT}
    arguments |= {"dtype": "float32", "max_num_seqs": 4, "engine_output_type": "audio"}
    engine = OmniLLMEngine.from_omni_engine_args(
        create_engine_args(str(tiny_qwen3), engine_type="generation", **arguments)
    )
    yield engine
    engine.close()


@pytest.fixture
def limited(engine, monkeypatch):
    """Steps of 32 tokens."""
    monkeypatch.setattr(engine._scheduler, "batch_tokens", 32)
    return engine


def add(engine, name, length, *, index=0, due=0.0, streams=True, is_last=False, priority=0):
    """A window of request `name` that is due in so many seconds; of a first window: whose request came then."""
    prompt = {
        "prompt_token_ids": [0] * length,
        "additional_information": {"codes": torch.zeros(length, dtype=torch.int64)},
    }
    engine.add_request(name, prompt, SamplingParams(max_tokens=1, detokenize=False), priority=priority)
    engine.set_window(name, RequestWindow(name, index, is_last, streams, time.monotonic() + due))
    if index:  # as if the window before it had been computed
        states = engine.model_executor.driver_worker.model_runner.states
        states.save(RequestWindow(name, index - 1, False), {"num_codes": length})


def batches(engine):
    """The requests of each step, until all are done."""
    steps = []
    engine.watch_steps(lambda step: None, steps.append)
    while engine.has_work():
        engine.step()
    return ["".join(step.num_computed_tokens) for step in steps if step.num_sequences]


def test_a_step_is_one_batch_of_the_model(limited):
    for name in "abcd":
        add(limited, name, 12)
    assert batches(limited) == ["ab", "cd"]


def test_a_window_larger_than_a_batch_has_a_step_of_its_own(limited):
    add(limited, "a", 50)
    add(limited, "b", 12)
    assert batches(limited) == ["a", "b"]


def test_without_a_declared_batch_a_step_takes_what_vllm_allows(engine):
    for name in "abcd":
        add(engine, name, 16)
    assert engine.batch_tokens == LIMIT and batches(engine) == ["abcd"]


def test_first_windows_pass_later_ones(limited):
    add(limited, "a", 30, index=1, due=-100.0)
    add(limited, "b", 30, index=1, due=-100.0)
    add(limited, "c", 4)
    add(limited, "d", 8)
    assert batches(limited)[0] == "cd"


def test_of_first_windows_the_one_that_came_first_is_first(limited):
    add(limited, "b", 20, due=-0.1)
    add(limited, "a", 20, due=-0.2)
    assert batches(limited) == ["a", "b"]


def test_of_later_windows_the_one_that_is_due_first_is_first(limited):
    add(limited, "a", 20, index=1, due=0.2)
    add(limited, "b", 20, index=1, due=-0.1)
    add(limited, "c", 20, index=1, due=0.4)
    assert batches(limited) == ["b", "a", "c"]


def test_a_request_that_is_not_streamed_neither_delays_first_windows_nor_waits_forever(limited):
    add(limited, "a", 20, due=-2.0, streams=False, is_last=True)
    add(limited, "b", 20, index=1, due=-1.0)
    add(limited, "c", 20, due=0.5, streams=False, is_last=True)
    add(limited, "d", 20)
    assert batches(limited) == ["d", "a", "b", "c"]


def test_priority_comes_first(limited):
    add(limited, "a", 20)
    add(limited, "b", 20, index=1, due=1.0, priority=-1)
    add(limited, "c", 20, priority=1)
    assert batches(limited) == ["b", "a", "c"]
