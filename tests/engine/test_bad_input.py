# SPDX-License-Identifier: Apache-2.0
"""What could make a model raise is refused for its request alone, while others are running."""

import pytest
import torch
from vllm import SamplingParams

from tests.engine.running import greedy, random_prompts, run, step_until_idle
from vllm_omni.errors import InvalidRequestError
from vllm_omni.payloads import PromptEmbedsPayload, TensorPayload

GOOD = [5, 6, 7]

BAD_PROMPTS = {
    "narrow embeddings": ({"prompt_embeds": torch.zeros(3, 64)}, r"\[len, 128\], got \[3, 64\]"),
    "flat embeddings": ({"prompt_embeds": torch.zeros(128)}, r"\[len, 128\], got \[128\]"),
    "embeddings of 4 dimensions": ({"prompt_embeds": torch.zeros(1, 1, 3, 128)}, r"\[len, 128\]"),
    "integer embeddings": ({"prompt_embeds": torch.zeros(3, 128, dtype=torch.int64)}, "floating point"),
    "embeddings as a list": ({"prompt_embeds": [[0.0] * 128]}, "must be a tensor"),
    "no embeddings": ({"prompt_embeds": torch.zeros(0, 128)}, "cannot be empty"),
    "too many embeddings": ({"prompt_embeds": torch.zeros(600, 128)}, "maximum"),
    "damaged embeddings": ({"prompt_embeds": PromptEmbedsPayload(b"abc", [3, 128], "float32")}, "got 3"),
    "embeddings and ids of two lengths": (
        {"prompt_embeds": torch.zeros(3, 128), "prompt_token_ids": [1, 2]},
        "length",
    ),
    "negative id": ({"prompt_token_ids": [1, -1]}, "-1"),
    "id behind the vocabulary": ({"prompt_token_ids": [1, 512]}, "512"),
    "no ids": ({"prompt_token_ids": []}, "empty"),
    "nothing": ({}, "must contain"),
    "too long": ({"prompt_token_ids": [1] * 600}, "maximum"),
    "object as information": (
        {"prompt_token_ids": GOOD, "additional_information": {"a": object()}},
        r"additional_information\['a'\] is a object",
    ),
    "list as information": ({"prompt_token_ids": GOOD, "additional_information": [1]}, "must be a dict"),
    "positions of 2 axes": (
        {"prompt_token_ids": GOOD, "additional_information": {"mrope_positions": torch.zeros(2, 3).long()}},
        r"\[3, 3\]",
    ),
    "positions of another length": (
        {"prompt_token_ids": GOOD, "additional_information": {"mrope_positions": torch.zeros(3, 2).long()}},
        r"\[3, 3\] or longer for this prompt, got \[3, 2\]",
    ),
    "fractional positions": (
        {"prompt_token_ids": GOOD, "additional_information": {"mrope_positions": torch.zeros(3, 3)}},
        "int64",
    ),
}


@pytest.fixture(params=["latent_engine", "hooked_engine"], ids=["with tokenizer", "without tokenizer"])
def engine(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompts(engine, prompt, message):
    engine.add_request("good", {"prompt_token_ids": GOOD}, greedy(4))
    engine.step()
    with pytest.raises(InvalidRequestError, match=message) as raised:
        engine.add_request("bad", prompt, greedy(4))
    assert raised.value.request_id == "bad"
    (output,) = step_until_idle(engine)
    assert output.request_id == "good" and len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize("text", ["", None, 3])
def test_bad_texts(latent_engine, text):
    with pytest.raises(InvalidRequestError):
        latent_engine.add_request("bad", {"prompt": text}, greedy(4))
    assert not latent_engine.has_unfinished_requests()


def test_bad_sampling_parameters(latent_engine):
    with pytest.raises(InvalidRequestError, match="vocab"):
        latent_engine.add_request("bad", {"prompt_token_ids": GOOD}, SamplingParams(allowed_token_ids=[9999]))
    assert not latent_engine.has_unfinished_requests()


def test_embeddings_without_the_engine_argument(text_engine):
    with pytest.raises(InvalidRequestError, match="enable-prompt-embeds"):
        text_engine.add_request("bad", {"prompt_embeds": torch.zeros(3, 128)}, greedy(4))


def test_embeddings_of_another_dtype_are_cast(latent_engine):
    embeds = torch.randn(9, 128).bfloat16()
    forms = [embeds, embeds.float(), embeds.double(), PromptEmbedsPayload.from_tensor(embeds)]
    outputs = run(latent_engine, [{"prompt_embeds": form} for form in forms], greedy(5))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_every_id_of_the_vocabulary_is_accepted(latent_engine):
    (output,) = run(latent_engine, [{"prompt_token_ids": [0, 511]}], greedy(2))
    assert len(output.outputs[0].token_ids) == 2


def test_a_request_of_another_id_is_refused(latent_engine):
    request = latent_engine.input_processor.process_inputs("a", {"prompt_token_ids": GOOD}, greedy(2))
    with pytest.raises(InvalidRequestError, match="'a'"):
        latent_engine.add_request("b", request, greedy(2))


def test_the_prompt_is_not_changed(latent_engine):
    (token_ids,) = random_prompts(3)
    prompt = {"prompt_token_ids": token_ids, "additional_information": {"a": torch.zeros(1)}}
    latent_engine.input_processor.process_inputs("a", prompt, greedy(2))
    assert sorted(prompt) == ["additional_information", "prompt_token_ids"] and prompt["prompt_token_ids"] is token_ids


def test_tensor_payloads_are_no_embeddings(latent_engine):
    payload = TensorPayload.from_tensor(torch.zeros(3, 128))
    with pytest.raises(InvalidRequestError, match="must be a tensor"):
        latent_engine.add_request("bad", {"prompt_embeds": payload}, greedy(2))
