# SPDX-License-Identifier: Apache-2.0
"""Text that is made in the caller's process equals the engine's."""

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.running import random_prompts, step_until_idle
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.engine.text_decoder import TextDecoder
from vllm_omni.outputs import Completion, StageOutput
from vllm_omni.payloads import OmniEngineCoreRequest

PROMPT = random_prompts(7)[0]


def make_request(engine: OmniLLMEngine, **params: object) -> OmniEngineCoreRequest:
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 24, **params})
    sampling.output_kind = RequestOutputKind.DELTA
    return engine.input_processor.process_inputs("r", {"prompt_token_ids": PROMPT}, sampling)


def run(engine: OmniLLMEngine, request: OmniEngineCoreRequest) -> list[StageOutput]:
    assert request.sampling_params is not None
    engine.add_request("r", request, request.sampling_params)
    return [
        StageOutput(
            request_id="r",
            stage_id=0,
            completions=[
                Completion(index=c.index, text=c.text, token_ids=list(c.token_ids), finish_reason=c.finish_reason)
                for c in output.outputs
            ],
        )
        for output in step_until_idle(engine)
    ]


def texts(pieces: list[StageOutput]) -> list[tuple[int, str]]:
    return [(completion.index, completion.text) for piece in pieces for completion in piece.completions]


def tokens(pieces: list[StageOutput]) -> list[int]:
    return [token for piece in pieces for token in piece.completions[0].token_ids]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n": 3},
        {"skip_special_tokens": False},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    ],
    ids=lambda params: "-".join(params) or "defaults",
)
def test_the_text_is_the_engine_s(text_engine: OmniLLMEngine, params: dict[str, object]) -> None:
    check_text(text_engine, params)


@pytest.mark.parametrize("is_included", [False, True])
def test_the_token_that_ends_a_text(text_engine: OmniLLMEngine, is_included: bool) -> None:
    stop = tokens(run(text_engine, make_request(text_engine)))[5]
    check_text(text_engine, {"stop_token_ids": [stop], "include_stop_str_in_output": is_included})


def check_text(text_engine: OmniLLMEngine, params: dict[str, object]) -> None:
    expected = run(text_engine, make_request(text_engine, **params))
    request = make_request(text_engine, **params)

    decoder = TextDecoder.take_over(text_engine.renderer.tokenizer, request)

    assert decoder is not None
    pieces = run(text_engine, request)
    assert not any(text for _, text in texts(pieces))
    for piece in pieces:
        decoder.decode(piece)
    assert texts(pieces) == texts(expected) and any(text for _, text in texts(expected))


def test_several_tokens_at_once(text_engine: OmniLLMEngine) -> None:
    expected = "".join(text for _, text in texts(run(text_engine, make_request(text_engine))))
    request = make_request(text_engine)
    decoder = TextDecoder.take_over(text_engine.renderer.tokenizer, request)
    assert decoder is not None
    completion = Completion(token_ids=tokens(run(text_engine, request)), finish_reason="length")
    whole = StageOutput(request_id="r", stage_id=0, completions=[completion])
    decoder.decode(whole)
    assert whole.completions[0].text == expected


@pytest.mark.parametrize("params", [{"stop": ["x"]}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"detokenize": False}])
def test_what_the_engine_decodes_itself(text_engine: OmniLLMEngine, params: dict[str, object]) -> None:
    request = make_request(text_engine, **params)
    assert TextDecoder.take_over(text_engine.renderer.tokenizer, request) is None
    assert request.sampling_params is not None and request.sampling_params.detokenize is params.get("detokenize", True)


def test_an_engine_without_a_tokenizer_makes_no_text(text_engine: OmniLLMEngine) -> None:
    assert TextDecoder.take_over(None, make_request(text_engine)) is None
