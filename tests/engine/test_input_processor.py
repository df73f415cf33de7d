# SPDX-License-Identifier: Apache-2.0
"""The front end preprocesses prompts without an engine, and a stage's engine takes what comes out."""

import pytest
import torch
import vllm.v1.engine.input_processor
import vllm.v1.engine.llm_engine
from vllm import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engine.running import greedy, random_prompts, step_until_idle
from vllm_omni.engine.engine_args import create_engine_args
from vllm_omni.engine.input_processor import OmniInputProcessor
from vllm_omni.errors import InvalidRequestError
from vllm_omni.payloads import OmniEngineCoreRequest
from vllm_omni.testing.media import make_prompt


def travel(request):
    return MsgpackDecoder(OmniEngineCoreRequest).decode([bytes(part) for part in MsgpackEncoder().encode(request)])


@pytest.fixture
def warnings_of_vllm(monkeypatch):
    """What vLLM's engine and input processor say to the developer of a caller; its loggers reach no other handler."""
    warnings = []
    for module in (vllm.v1.engine.llm_engine, vllm.v1.engine.input_processor):
        monkeypatch.setattr(module.logger, "warning_once", lambda message, *args: warnings.append(message))
    return warnings


def test_a_request_from_another_process(latent_engine, oracle, warnings_of_vllm):
    processor = OmniInputProcessor(latent_engine.vllm_config)
    (prompt,) = random_prompts(40)
    embeds = oracle.model.get_input_embeddings().weight[prompt].detach()
    information = {"a": torch.randn(3), "b": "text"}
    request = travel(
        processor.process_inputs("0", {"prompt_embeds": embeds, "additional_information": information}, greedy(6))
    )
    latent_engine.add_request("0", request, SamplingParams(), prompt_text="shown")
    latent_engine.step()
    runner = latent_engine.model_executor.driver_worker.model_runner
    (held,) = runner.omni_info.values()
    torch.testing.assert_close(held["a"], information["a"])
    assert held["b"] == "text"
    (output,) = step_until_idle(latent_engine)
    assert (output.request_id, output.prompt) == ("0", "shown")
    assert output.outputs[0].token_ids == oracle_tokens(oracle, prompt, 6)
    assert warnings_of_vllm == []


@torch.no_grad()
def oracle_tokens(oracle, prompt, num_tokens):
    tokens = []
    for _ in range(num_tokens):
        tokens.append(int(oracle.model(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
    return tokens


def test_the_bytes_are_stored_once(latent_engine):
    """The scheduler releases the payload once the runner has it."""
    prompt = {"prompt_token_ids": [1, 2, 3], "additional_information": {"a": torch.randn(3)}}
    latent_engine.add_request("0", prompt, greedy(3))
    (request,) = latent_engine.engine_core.engine_core.scheduler.requests.values()
    assert request.additional_information is not None
    latent_engine.step()
    assert request.additional_information is None
    step_until_idle(latent_engine)


@pytest.fixture(scope="module")
def processor(tiny_qwen3_omni_moe):
    return OmniInputProcessor(create_engine_args(str(tiny_qwen3_omni_moe), dtype="float32").create_engine_config())


class TestMultimodal:
    @pytest.fixture
    def request_with_image(self, processor, tiny_qwen3_omni_moe):
        return processor.process_inputs("0", make_prompt(tiny_qwen3_omni_moe, "image"), greedy(4))

    def test_features_are_serialized_with_their_tensors(self, request_with_image):
        (feature,) = request_with_image.mm_features
        (travelled,) = travel(request_with_image).mm_features
        assert travelled.mm_position == feature.mm_position and travelled.mm_hash == feature.mm_hash
        before, after = feature.data.get_data(), travelled.data.get_data()
        assert sorted(before) == sorted(after)
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor)

    def test_the_second_request_of_an_item_has_it_too(self, processor, tiny_qwen3_omni_moe):
        """The engine that saw the first request may be gone."""
        prompt = make_prompt(tiny_qwen3_omni_moe, "image")
        features = [processor.process_inputs(i, prompt, greedy(4)).mm_features[0] for i in "01"]
        assert features[0].mm_hash == features[1].mm_hash
        assert features[0].data is not None and features[1].data is not None

    def test_only_placeholders_can_have_any_id(self, processor, request_with_image):
        position = request_with_image.mm_features[0].mm_position.offset
        ids = list(request_with_image.prompt_token_ids)
        request_with_image.prompt_token_ids = [*ids[:position], 100_000, *ids[position + 1 :]]
        processor._check_token_ids(request_with_image)
        request_with_image.prompt_token_ids = [100_000, *ids[1:]]
        with pytest.raises(ValueError, match="100000 at position 0"):
            processor._check_token_ids(request_with_image)


class TestAdmission:
    def test_an_id_that_is_running_is_refused(self, latent_engine):
        latent_engine.add_request("0", {"prompt_token_ids": [1, 2]}, greedy(2))
        with pytest.raises(InvalidRequestError, match="running"):
            latent_engine.add_request("0", {"prompt_token_ids": [1, 2]}, greedy(2))
        assert len(step_until_idle(latent_engine)) == 1
        latent_engine.add_request("0", {"prompt_token_ids": [1, 2]}, greedy(2))
        assert len(step_until_idle(latent_engine)) == 1

    def test_a_request_that_the_core_refuses_is_removed(self, latent_engine, monkeypatch):
        def refuse(request):
            raise RuntimeError("refused")

        with monkeypatch.context() as patched:
            patched.setattr(latent_engine.engine_core.engine_core.scheduler, "add_request", refuse)
            with pytest.raises(RuntimeError, match="refused"):
                latent_engine.add_request("0", {"prompt_token_ids": [1, 2]}, greedy(2, n=2, temperature=1.0))
        assert not latent_engine.has_unfinished_requests()
