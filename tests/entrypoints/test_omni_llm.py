# SPDX-License-Identifier: Apache-2.0
"""`OmniLLM` with three vLLM engines in three processes, compared with HF transformers."""

import itertools
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.distributed.test_run_dir import memory  # noqa: F401 (a fixture)
from tests.docs.pages import ROOT, snippets
from tests.entrypoints.fake_pipelines import by_request, check_events, make_chat, wait_until_free
from tests.forked_programs import imported
from tests.orchestrator.pipelines import fresh_stats
from vllm_omni import OmniLLM
from vllm_omni.errors import InvalidRequestError, PipelineClosedError, StageConfigError
from vllm_omni.events import ARSegmentEvent, ErrorEvent
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.testing.hf_oracle import HFOracle, HFTextOracle
from vllm_omni.testing.media import PROMPT_KINDS, example_prompts, make_prompt, mixed_prompts

GROUP = "llm"
THINKER_TOKENS, TALKER_TOKENS = 16, 24
GREEDY = [
    SamplingParams(temperature=0.0, max_tokens=THINKER_TOKENS),
    {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": TALKER_TOKENS, "detokenize": False},
    None,
]


@pytest.fixture(scope="module")
def oracle(tiny_qwen3_omni_moe: Path) -> HFOracle:
    return HFOracle(tiny_qwen3_omni_moe)


@pytest.fixture(scope="module")
def llm(talking_llm: OmniLLM) -> OmniLLM:
    return talking_llm


def check_against_oracle(prompt: dict[str, Any], outputs: list[OmniRequestOutput], oracle: HFOracle) -> None:
    text, speech = outputs
    expected = oracle.generate(prompt, thinker_max_tokens=THINKER_TOKENS, talker_max_tokens=TALKER_TOKENS)
    assert (text.final_output_type, speech.final_output_type) == ("text", "audio")
    assert text.prompt_token_ids == expected.prompt_token_ids
    assert text.outputs[0].token_ids == expected.thinker_token_ids
    audio = speech.multimodal_output["audio"]
    assert audio.dtype == torch.float32 and audio.shape == expected.audio.shape
    torch.testing.assert_close(audio, expected.audio, rtol=0, atol=1e-4)
    frames = speech.stage_metrics[2].num_input_tokens
    assert frames == expected.codes.shape[1]


@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_a_prompt_alone_equals_hf(kind: str, llm: OmniLLM, oracle: HFOracle, tiny_qwen3_omni_moe: Path) -> None:
    prompt = example_prompts(tiny_qwen3_omni_moe)[kind]
    check_against_oracle(prompt, llm.generate(prompt, GREEDY, use_tqdm=False), oracle)


def test_eight_different_prompts_at_once_equal_hf(llm: OmniLLM, oracle: HFOracle, tiny_qwen3_omni_moe: Path) -> None:
    prompts = mixed_prompts(tiny_qwen3_omni_moe, 8, seed=10)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len(outputs) == 16
    for i, prompt in enumerate(prompts):
        check_against_oracle(prompt, outputs[2 * i : 2 * i + 2], oracle)


def test_fields_are_also_those_of_request_output(llm: OmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    prompt = make_prompt(tiny_qwen3_omni_moe, "text")
    text, speech = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert text.request_output[0].outputs[0].text == text.outputs[0].text != ""
    assert text.prompt == prompt["prompt"] and text.finished and text.images == []
    assert text.multimodal_output == {}  # what only the talker reads does not reach the caller
    assert speech.request_output[0].multimodal_output["audio"] is speech.multimodal_output["audio"]
    assert text.request_id == speech.request_id
    assert [stage.name for stage in text.stage_metrics] == ["thinker", "talker", "code2wav"]
    assert text.stage_metrics[0].num_output_tokens == len(text.outputs[0].token_ids)


def test_modalities_select_outputs_and_stages_of_each_prompt(llm: OmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    prompt = make_prompt(tiny_qwen3_omni_moe, "text")
    prompts = [prompt | {"modalities": wanted} for wanted in (["text"], ["audio"], ["text", "audio"], None)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    kinds = [(output.request_id, output.final_output_type) for output in outputs]
    first = int(outputs[0].request_id)
    wanted = [(0, "text"), (1, "audio"), (2, "text"), (2, "audio"), (3, "text"), (3, "audio")]
    assert kinds == [(str(first + i), kind) for i, kind in wanted]
    assert [stage.name for stage in outputs[0].stage_metrics] == ["thinker"]


@pytest.mark.slow
def test_stages_process_different_requests_concurrently(llm: OmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    prompts = [make_prompt(tiny_qwen3_omni_moe, "text", seed=i) for i in range(8)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    thinker, talker = ([output.stage_metrics[i] for output in outputs[::2]] for i in (0, 1))

    def overlap(a: StageMetrics, b: StageMetrics) -> bool:
        return a.arrival < b.finished and b.arrival < a.finished

    assert any(overlap(a, b) for a, b in itertools.combinations(talker, 2))  # several requests in one stage
    assert any(overlap(a, b) for i, a in enumerate(talker) for j, b in enumerate(thinker) if i != j)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "x", "modality": ["text"]}, "unknown key 'modality' in a prompt; did you mean 'modalities'?"),
        ({"prompt": "x", "modalities": ["audios"]}, "cannot output 'audios'; did you mean 'audio'?"),
        ({"prompt": "x", "modalities": []}, "modalities must be a list"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [5, 99999]}, "99999"),
        ({"prompt_token_ids": [5] * 2000}, "1024"),
        (17, "a prompt is a string or a dict"),
    ],
)
def test_an_error_names_what_is_wrong_in_a_prompt(prompt: Any, words: str, llm: OmniLLM) -> None:
    with pytest.raises(InvalidRequestError, match=words.replace("?", r"\?")):
        llm.generate([prompt], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([None], "one entry for each of the 3 stages (thinker, talker, code2wav)"),
        (SamplingParams(), "one entry for each of the 3 stages"),
        ([{"temprature": 1}, None, None], "unknown sampling parameter 'temprature' for stage 'thinker'"),
        ([{"top_k": 1 << 64}, None, None], "top_k must be a 64-bit integer"),
        ([{"temperature": -1.0}, None, None], "temperature"),
    ],
)
def test_an_error_names_a_wrong_sampling_parameter(params: Any, words: str, llm: OmniLLM) -> None:
    with pytest.raises(InvalidRequestError) as error:
        llm.generate("x", params, use_tqdm=False)
    assert words in str(error.value)


def test_a_request_that_fails_in_a_stage_does_not_affect_others(llm: OmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    good = make_prompt(tiny_qwen3_omni_moe, "text")
    bad = make_chat(1020)  # too long for the talker only, whose prompt has a few rows more
    with pytest.raises(InvalidRequestError, match=r"stage 1 \(talker\).*1024.*1026") as error:
        llm.generate([good, bad, good], GREEDY, use_tqdm=False)
    assert len(error.value.results) == 4
    reference = llm.generate(good, GREEDY, use_tqdm=False)
    for output in error.value.results[1::2]:
        torch.testing.assert_close(
            output.multimodal_output["audio"], reference[1].multimodal_output["audio"], rtol=0, atol=1e-5
        )


@pytest.fixture
def mixed(tiny_qwen3_omni_moe: Path) -> list[Any]:
    """Prompts of which two are refused, and one fails in a stage."""
    good = make_prompt(tiny_qwen3_omni_moe, "text")
    return [good, {"prompt_token_ids": [5, 99999]}, good, make_chat(1020), {"prompt": "x", "modalities": []}, good]


def test_each_prompt_fails_alone(llm: OmniLLM, mixed: list[Any]) -> None:
    reference = llm.generate(mixed[0], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: .*99999") as error:
        llm.generate(mixed, GREEDY, use_tqdm=False)
    good = [output.outputs[0].text for output in error.value.results if output.final_output_type == "text"]
    assert good == [reference[0].outputs[0].text] * 3 and len(error.value.results) == 6


def test_errors_are_returned(llm: OmniLLM, mixed: list[Any]) -> None:
    outputs = llm.generate(mixed, GREEDY, use_tqdm=False, on_error="return")
    errors = [str(output.error) if output.error else None for output in outputs]
    assert [error and error[:9] for error in errors] == [
        None, None, "prompt 1:", None, None, "prompt 3:", "prompt 4:", None, None
    ]  # fmt: skip
    assert "stage 1 (talker)" in str(errors[5]) and outputs[5].error.stage_id == 1  # type: ignore[union-attr]
    speech = ["text", "audio"]
    assert [output.final_output_type for output in outputs] == [*speech, "", *speech, "", "", *speech]
    assert outputs[2].outputs == [] and outputs[2].multimodal_output == {}
    (alone,) = llm.generate(mixed[1], GREEDY, use_tqdm=False, on_error="return")
    assert str(alone.error).startswith("Token id 99999")
    with pytest.raises(InvalidRequestError, match="on_error must be"):
        llm.generate(mixed, GREEDY, on_error="ignore")  # type: ignore[call-overload]


def test_a_stream_has_the_errors_of_refused_prompts(llm: OmniLLM, mixed: list[Any]) -> None:
    ends = [event for event in llm.generate(mixed, GREEDY, stream=True) if event.is_terminal]
    assert len(ends) == len({event.request_id for event in ends}) == len(mixed)
    failed = {str(event.error)[:9] for event in ends if isinstance(event, ErrorEvent)}
    assert failed == {"prompt 1:", "prompt 3:", "prompt 4:"}


def test_eight_streaming_requests_equal_complete_results(llm: OmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    """Text, codes and speech stream through all stages; their segments add up to the complete results."""
    prompts = mixed_prompts(tiny_qwen3_omni_moe, 8, seed=20)
    by_id = by_request(llm.generate(prompts, GREEDY, stream=True))
    at_once = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len(by_id) == 8
    for i, request_id in enumerate(sorted(by_id, key=int)):
        events = by_id[request_id]
        end = check_events(events)
        for output, reference in zip(end.outputs, at_once[2 * i : 2 * i + 2], strict=True):
            assert output.prompt_token_ids == reference.prompt_token_ids and output.prompt == reference.prompt
            assert output.outputs[0].token_ids == reference.outputs[0].token_ids
            assert output.outputs[0].text == reference.outputs[0].text
            assert output.outputs[0].finish_reason == reference.outputs[0].finish_reason
        audio, expected = (outputs[1].multimodal_output["audio"] for outputs in (end.outputs, at_once[2 * i :]))
        torch.testing.assert_close(audio, expected, rtol=0, atol=1e-4)
        segments = [event for event in events if isinstance(event, ARSegmentEvent)]
        num_tokens, num_frames = (stage.num_output_tokens for stage in end.outputs[0].stage_metrics[:2])
        assert len([segment for segment in segments if segment.stage_id == 0]) >= min(num_tokens, 2)
        spoken = [segment for segment in segments if segment.stage_id == 2]
        assert {segment.final_output_type for segment in spoken} == {"audio"}
        assert len(spoken) >= (2 if num_frames > 5 else 1), "the first window has four frames"
        assert all(segment.multimodal_output == {} for segment in segments if segment.stage_id == 0)


def test_speech_starts_while_text_is_generated(llm: OmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    prompt = make_prompt(tiny_qwen3_omni_moe, "text")
    params = [{"temperature": 0.0, "min_tokens": 400, "max_tokens": 400}, {**GREEDY[1], "min_tokens": 20}, None]
    for event in llm.generate(prompt, params, stream=True):
        assert isinstance(event, ARSegmentEvent)
        if event.final_output_type == "audio":
            break
        assert not event.is_last, "the text was complete before the first audio"


def test_aborts_in_every_stage_free_every_kv_block(llm: OmniLLM, tiny_qwen3_omni_moe: Path) -> None:
    prompt = make_prompt(tiny_qwen3_omni_moe, "text")
    endless = [{"max_tokens": 900, "ignore_eos": True}, None, None]
    events = llm.generate([prompt] * 6, endless, stream=True)
    next(events)
    assert any(stage.kv_blocks_used for stage in fresh_stats(llm._pipeline.orchestrator))
    events.close()  # type: ignore[attr-defined]
    wait_until_free(llm)
    for event in llm.generate([prompt] * 3, GREEDY, stream=True):
        if isinstance(event, ARSegmentEvent) and event.is_last:
            break  # The text of one is complete; its speech and the other texts are not.
    wait_until_free(llm)


def test_default_sampling_parameters_are_those_of_the_configuration(tiny_qwen3_omni_moe: Path, llm: OmniLLM) -> None:
    prompt = make_prompt(tiny_qwen3_omni_moe, "text") | {"modalities": ["audio"]}
    capped = [{"temperature": 0.0, "max_tokens": 8}, {"temperature": 0.0, "max_tokens": 5, "detokenize": False}, None]
    (speech,) = llm.generate(prompt, capped, use_tqdm=False)
    assert speech.stage_metrics[1].num_output_tokens <= 5
    seeded = [GREEDY[0], None, None]  # the talker samples, by the configuration's defaults
    prompt = make_chat(980) | {"modalities": ["audio"]}  # which leaves room for few frames
    first, second = (llm.generate(prompt, seeded, use_tqdm=False)[0].multimodal_output["audio"] for _ in range(2))
    assert first.shape != second.shape or not torch.equal(first, second)


def children() -> set[psutil.Process]:
    imported()  # It outlives all pipelines.
    return set(psutil.Process().children(recursive=True))


def test_an_unknown_argument_starts_no_stage(tiny_qwen3_omni_moe: Path) -> None:
    before = children()
    with pytest.raises(StageConfigError, match=r"max_modle_len.*did you mean 'max_model_len'"):
        OmniLLM(str(tiny_qwen3_omni_moe), max_modle_len=128)
    with pytest.raises(StageConfigError, match="there is no stage 'singer'"):
        OmniLLM(str(tiny_qwen3_omni_moe), stage_overrides={"singer": {"dtype": "float32"}})
    assert children() <= before


@pytest.mark.slow
def test_arguments_reach_stages_and_an_exception_closes_the_pipeline(
    tiny_qwen3: Path,
    memory: Path,  # noqa: F811
) -> None:
    """A text model without a stage configuration is a pipeline of one stage."""
    imported()
    before = children()
    with pytest.raises(ZeroDivisionError), OmniLLM(
        str(tiny_qwen3), dtype="float32", stage_overrides={"text": {"max_model_len": 32}},
        kv_cache_memory_bytes=1 << 24, enforce_eager=True,
    ) as llm:  # fmt: skip
        assert len(list(memory.iterdir())) == 1
        (output,) = llm.generate("user hello", [{"temperature": 0.0, "max_tokens": 4}], use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4 and output.final_output_type == "text"
        with pytest.raises(InvalidRequestError, match="32"):
            llm.generate({"prompt_token_ids": [5] * 40}, use_tqdm=False)
        raise ZeroDivisionError  # in user code
    with pytest.raises(PipelineClosedError):
        llm.generate("user hello", use_tqdm=False)
    assert children() <= before
    assert list(memory.iterdir()) == []


@pytest.mark.slow
def test_hidden_states_of_a_stage(tiny_qwen3: Path, tmp_path: Path) -> None:
    """As `docs/offline.md` says."""
    file = tmp_path / "stages.yaml"
    (text,) = snippets("yaml", pages=[ROOT / "docs" / "offline.md"])
    file.write_text(text.text)
    prompt = list(range(20, 29))
    model = HFTextOracle(tiny_qwen3).model
    with OmniLLM(str(tiny_qwen3), stage_configs_path=str(file), dtype="float32", max_model_len=64) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt}] * 2, {"max_tokens": 4, "temperature": 0.0}, use_tqdm=False
        )
    for output in outputs:
        written = [*prompt, *output.outputs[0].token_ids]
        with torch.no_grad():
            expected = model.model(torch.tensor([written[:-1]])).last_hidden_state[0]
        torch.testing.assert_close(output.multimodal_output["hidden"], expected, rtol=0, atol=1e-4)
