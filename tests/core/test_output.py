# SPDX-License-Identifier: Apache-2.0
"""Our structures keep all fields of vLLM's, also those that a later vLLM adds."""

import pickle
from dataclasses import fields

import pytest
import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.core.sched.output import (
    InputChunk,
    OmniModelRunnerOutput,
    OmniNewRequestData,
    OmniRequest,
    OmniSchedulerOutput,
    StepRecord,
)
from vllm_omni.payloads import AdditionalInformationPayload


def filled(cls):
    """An instance with different values in all fields."""
    return cls(**{field.name: object() for field in fields(cls)})


def test_new_request_data():
    payload = AdditionalInformationPayload.from_dict({"a": 1})
    base = filled(NewRequestData)
    ours = OmniNewRequestData.from_base(base, additional_information=payload)
    assert all(getattr(ours, field.name) is getattr(base, field.name) for field in fields(NewRequestData))
    assert ours.additional_information is payload and ours.is_input_complete
    assert not OmniNewRequestData.from_base(base, is_input_complete=False).is_input_complete


def test_scheduler_output():
    chunks = {"a": [InputChunk(0, is_last=True)]}
    base = filled(SchedulerOutput)
    ours = OmniSchedulerOutput.from_base(base, input_chunks=chunks)
    assert all(getattr(ours, field.name) is getattr(base, field.name) for field in fields(SchedulerOutput))
    assert ours.input_chunks is chunks


def test_chunks_reach_workers_in_other_processes():
    payload = AdditionalInformationPayload.from_dict({"rows": torch.arange(3.0)})
    output = OmniSchedulerOutput.from_base(
        SchedulerOutput.make_empty(), input_chunks={"a": [InputChunk(0, payload, True)]}
    )
    (chunk,) = pickle.loads(pickle.dumps(output)).input_chunks["a"]
    assert chunk.is_last and chunk.information.to_dict()["rows"].tolist() == [0, 1, 2]


def test_the_record_of_a_step_reaches_workers_in_other_processes():
    step = StepRecord(num_tokens=3, num_sequences=1, num_computed_tokens={"a": 3}, num_sent_chunks={"a-0": 1})
    output = OmniSchedulerOutput.from_base(SchedulerOutput.make_empty(), step=step)
    assert pickle.loads(pickle.dumps(output)).step == step


def test_a_chunk_is_kept_until_a_step_that_had_it_is_computed():
    """Also if the next step is scheduled, with the next chunk, before that."""
    request = OmniRequest.__new__(OmniRequest)
    request.additional_information, request.input_chunks = None, []
    request.add_chunk(None, is_last=False)
    assert not request.may_resend_input
    (first,) = request.send_chunks()
    request.add_chunk(None, is_last=True)
    (second,) = request.send_chunks()
    assert request.send_chunks() == [] and request.input_chunks == [first, second]
    request.drop_sent_input(1)
    assert request.may_resend_input and request.input_chunks == [second]
    request.num_sent_chunks = 0  # The second step has raised.
    assert not request.may_resend_input and request.send_chunks() == [second]
    request.drop_sent_input(2)
    assert not request.may_resend_input and request.input_chunks == []


def test_model_runner_output():
    base = filled(ModelRunnerOutput)
    ours = OmniModelRunnerOutput.from_base(base, pooler_output=[None])
    names = [field.name for field in fields(ModelRunnerOutput) if field.name != "pooler_output"]
    assert all(getattr(ours, name) is getattr(base, name) for name in names)
    assert ours.pooler_output == [None]


@pytest.mark.parametrize("req_ids", [[], ["a"]])
def test_they_reach_workers_in_other_processes(req_ids):
    output = OmniModelRunnerOutput(req_ids, {}, pooler_output=[{"rows": torch.ones(2)} for _ in req_ids])
    received = pickle.loads(pickle.dumps(output))
    assert type(received) is OmniModelRunnerOutput and len(received.pooler_output) == len(req_ids)
