# SPDX-License-Identifier: Apache-2.0
"""A model without attention, KV cache and tokens runs through the generation scheduler in one step for each batch."""

import pytest
import torch
from vllm import SamplingParams

from tests.engine.running import step_until_idle
from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.errors import InvalidRequestError

PARAMS = SamplingParams(max_tokens=1, detokenize=False)


def frames(length, **information):
    codes = torch.arange(length, dtype=torch.int64) + length
    return {"prompt_token_ids": [0] * length, "additional_information": {"codes": codes, **information}}


def expected_audio(length):
    return ((torch.arange(length) + length).float() * 0.5).repeat_interleave(2)


def test_batches_of_different_lengths(vocoder_engine):
    lengths = [5, 20, 1, 30, 9, 40, 63, 2, 3, 4]
    for index, length in enumerate(lengths):
        vocoder_engine.add_request(str(index), frames(length), PARAMS)
    outputs = step_until_idle(vocoder_engine)
    assert [output.request_id for output in outputs] == [str(index) for index in range(len(lengths))]
    for length, output in zip(lengths, outputs, strict=True):
        assert output.finished and output.outputs[0].finish_reason == "stop"
        assert list(output.outputs[0].token_ids) == [] and output.outputs[0].text == ""
        torch.testing.assert_close(output.multimodal_output["audio"], expected_audio(length))
    # 5 + 20 + 1 + 30 fit into the 64 of a step, 9 + 40 + nothing more, 63, and the rest.
    assert [int(output.multimodal_output["batch"]) for output in outputs] == [4, 4, 4, 4, 2, 2, 1, 3, 3, 3]


def test_an_output_does_not_keep_the_memory_of_its_batch(vocoder_engine):
    for index in range(3):
        vocoder_engine.add_request(str(index), frames(10), PARAMS)
    for output in step_until_idle(vocoder_engine):
        audio = output.multimodal_output["audio"]
        assert audio.untyped_storage().nbytes() == audio.nbytes


def test_a_prompt_longer_than_a_step_is_refused(vocoder_engine):
    with pytest.raises(InvalidRequestError, match="64"):
        vocoder_engine.add_request("long", frames(65), PARAMS)
    assert not vocoder_engine.has_unfinished_requests()


def test_a_prompt_longer_than_a_step_does_not_block_others(vocoder_engine, monkeypatch):
    """Should one get past the input processor, it fails, and those behind it are served in the same step."""
    monkeypatch.setattr(vocoder_engine.engine_core.engine_core.scheduler, "max_prompt_tokens", 16)
    for index, length in enumerate([17, 5, 20, 6]):
        vocoder_engine.add_request(str(index), frames(length), PARAMS)
    outputs = {output.request_id: output for output in vocoder_engine.step()}
    reasons = {request_id: output.outputs[0].finish_reason for request_id, output in outputs.items()}
    assert reasons == {"0": "error", "1": "stop", "2": "error", "3": "stop"}
    assert not vocoder_engine.has_unfinished_requests()
    torch.testing.assert_close(outputs["3"].multimodal_output["audio"], expected_audio(6))


def test_only_a_prompt_that_is_too_long(vocoder_engine, monkeypatch):
    monkeypatch.setattr(vocoder_engine.engine_core.engine_core.scheduler, "max_prompt_tokens", 16)
    vocoder_engine.add_request("long", frames(17), PARAMS)
    (output,) = step_until_idle(vocoder_engine)
    assert output.outputs[0].finish_reason == "error" and output.multimodal_output == {}


def test_an_aborted_request_is_not_run(vocoder_engine):
    vocoder_engine.add_request("kept", frames(5), PARAMS)
    vocoder_engine.add_request("aborted", frames(6), PARAMS)
    vocoder_engine.abort_request(["aborted"])
    (output,) = step_until_idle(vocoder_engine)
    assert output.request_id == "kept"


def test_the_engine_survives_an_exception(vocoder_engine):
    vocoder_engine.add_request("bad", frames(5, **{"raise": True}), PARAMS)
    with pytest.raises(RuntimeError, match="told to raise"):
        vocoder_engine.step()
    assert vocoder_engine.recover() == []
    vocoder_engine.add_request("good", frames(7), PARAMS)
    vocoder_engine.abort_request(["bad"])
    (output,) = step_until_idle(vocoder_engine)
    torch.testing.assert_close(output.multimodal_output["audio"], expected_audio(7))


def test_it_has_no_kv_cache(vocoder_engine):
    assert vocoder_engine.model_executor.driver_worker.model_runner.kv_caches == []


def test_steps_take_the_longest_prompt_unless_told_otherwise(tiny_qwen3):
    arguments = create_engine_args(str(tiny_qwen3), engine_type="generation", model_arch="DoublingVocoder")
    config = arguments.create_engine_config()
    assert config.scheduler_config.max_num_batched_tokens >= config.model_config.max_model_len
    assert not config.scheduler_config.enable_chunked_prefill
