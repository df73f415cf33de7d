# SPDX-License-Identifier: Apache-2.0
"""VibeVoice against HF's on the same weights, with the same seeds.

Nothing that is fed back is rounded to codes, so a difference in the last bit could grow from frame to frame. With the
tiny checkpoint it does not: in the reference a prompt alone and one in a padded batch, with equal noise, differ by at
most 4e-7 in each of 40 frames, the last no more than the tenth. So the bound is that of all other speech.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.models.csm.prompts import sound
from tests.model_executor.models.engines import PreemptionCounter
from tests.model_executor.models.speech import SpeechModel
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.model_executor.prompt_processor import PromptProcessor, load_prompt_processor
from vllm_omni.testing.oracles.vibevoice import Speech, VibeVoiceReference

from .prompts import PROMPTS

MAX_FRAMES = 40
SEED = 3
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def prompt_processor(tiny_vibevoice: Path) -> PromptProcessor:
    pipeline = load_pipeline_config(stage_configs_dir() / "vibevoice.yaml")
    processor = load_prompt_processor(pipeline.stages[0], str(tiny_vibevoice))
    assert processor is not None
    return processor


@pytest.fixture(scope="module")
def model(prompt_processor: PromptProcessor, engine: OmniLLMEngine) -> SpeechModel:
    return SpeechModel(engine, prompt_processor, {}, {"temperature": 0.0, "max_tokens": MAX_FRAMES + 1, "seed": SEED})


@pytest.fixture(scope="module")
def expected(reference: VibeVoiceReference) -> dict[str, Speech]:
    return {name: reference.speak(prompt, MAX_FRAMES, SEED) for name, prompt in PROMPTS.items()}


def check(outputs: dict[str, Any], expected: dict[str, Speech]) -> None:
    for name, output in outputs.items():
        if name not in expected:
            continue
        speech = expected[name]
        (completion,) = output.outputs
        assert list(completion.token_ids)[:MAX_FRAMES] == speech.token_ids, name
        torch.testing.assert_close(output.multimodal_output["audio"], speech.audio, rtol=0, atol=TOLERANCE)


def test_requests_alone(model: SpeechModel, expected: dict[str, Speech]) -> None:
    for name, prompt in PROMPTS.items():
        check(model.run({name: prompt}), expected)
    lengths = {len(speech.token_ids) for speech in expected.values()}
    assert len(lengths) > 2 and min(lengths) > 1, "speech of different lengths, of which some has ended by itself"


def test_all_at_once_with_chunks_and_preemptions(
    model: SpeechModel, expected: dict[str, Speech], monkeypatch: pytest.MonkeyPatch
) -> None:
    preemptions = PreemptionCounter(model.engine, monkeypatch)
    outputs = model.run({**PROMPTS, "other seed": PROMPTS["words"]}, own={"other seed": {"seed": SEED + 1}})
    check(outputs, expected)
    assert preemptions.count > 0
    other, own = (outputs[name].multimodal_output["audio"] for name in ("other seed", "words"))
    assert other.shape != own.shape or (other - own).abs().max() > 0.01


def test_an_abort_leaves_the_others_and_nothing_else(model: SpeechModel, expected: dict[str, Speech]) -> None:
    for name, prompt in PROMPTS.items():
        given = model.prompt_processor(prompt)
        for request_id in (name, f"{name}, aborted"):
            model.engine.add_request(request_id, given.as_prompt(), given.apply_to(model.params()))
    outputs: dict[str, Any] = {}
    aborted = [f"{name}, aborted" for name in PROMPTS]
    while model.engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in model.engine.step()}  # type: ignore[misc]
        model.engine.abort_request(aborted[-1:])
        aborted = aborted[:-1]
    check(outputs, expected)
    model.engine.engine_core.get_output()  # what has ended is dropped with the next step
    runner = model.runner
    assert (len(runner.slots), runner.omni_info, runner.open_inputs, runner.requests) == (0, {}, set(), {})
    assert runner.slots.lowest_free == 0 and runner.strategy._prompts == {}


def test_a_step_that_raises_runs_again(
    model: SpeechModel, expected: dict[str, Speech], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the sound was decoded: no noise is drawn twice, and no state has advanced."""
    given = model.prompt_processor(PROMPTS["words"])
    model.engine.add_request("words", given.as_prompt(), given.apply_to(model.params()))
    outputs: dict[str, Any] = {}
    for _ in range(3):
        outputs |= {output.request_id: output for output in model.engine.step()}  # type: ignore[misc]
    with monkeypatch.context() as patched:
        patched.setattr(model.runner.model, "listen", _fail)
        with pytest.raises(RuntimeError, match="it listens to nothing"):
            model.engine.step()
    model.engine.recover()
    while model.engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in model.engine.step()}  # type: ignore[misc]
    check(outputs, expected)


def _fail(*args: Any) -> None:
    raise RuntimeError("it listens to nothing")


def test_the_references_error_is_still_there(
    reference: VibeVoiceReference, expected: dict[str, Speech], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It guides tokens, too."""
    monkeypatch.delattr(reference.model, "_get_logits_processor")
    spoken = [reference.speak(PROMPTS[name], MAX_FRAMES, SEED).token_ids for name in ("words", "voice", "voices")]
    assert spoken != [expected[name].token_ids for name in ("words", "voice", "voices")]


def test_the_prompt_is_that_of_hf(prompt_processor: PromptProcessor, reference: VibeVoiceReference) -> None:
    for prompt in PROMPTS.values():
        made = prompt_processor(prompt).additional_information  # type: ignore[arg-type]
        theirs = reference.read_prompt(prompt)
        assert torch.equal(made["text_ids"], theirs["input_ids"][0])
        waves = made["sounds"].split(made["sound_sizes"].tolist()) if len(made["sounds"]) else ()
        for wave, padded in zip(waves, theirs.get("input_values", ()), strict=True):
            assert torch.equal(wave, padded[0, : len(wave)])


def test_lines_of_a_script(prompt_processor: PromptProcessor, reference: VibeVoiceReference) -> None:
    """A speaker without a mark is the request's, a line without one goes on, and the lowest speaker is 0."""
    text = "yes\n\nspeaker 4: hello\n  there\nSPEAKER 3 : good day"
    made = prompt_processor({"prompt": text, "additional_information": {"speaker": "2"}})
    script = " Speaker 0: yes\n Speaker 2: hello there\n Speaker 1: good day\n"
    text_ids = made.additional_information["text_ids"]  # type: ignore[index]
    assert script in reference.processor.tokenizer.decode(text_ids)


@pytest.mark.parametrize(
    ("information", "message"),
    [
        ({"ref_text": "yes"}, "reads no 'ref_text'"),
        ({"instructions": "loud"}, "reads no 'instructions'"),
        ({"ref_audio": sound(61, 0)}, "ref_audio must be a sound of at most 60 s"),
        ({"speaker": "ann"}, "unknown speaker 'ann'"),
        ({"guidance_scale": -1}, "guidance_scale must be a number"),
        ({"context": {}}, "context must be a list"),
        ({"context": [{"speaker": "1"}]}, r"context\[0\] must be a dict with audio"),
        ({"context": [{"speaker": "1", "audio": sound(1, 0)}]}, "speaker 1, who says nothing"),
        ({"ref_audio": sound(1, 0), "context": [{"audio": sound(1, 0)}]}, "speaker 0 has a voice already"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    information: dict[str, Any], message: str, prompt_processor: PromptProcessor
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        prompt_processor({"prompt": "hello", "additional_information": information})


@pytest.mark.parametrize(
    ("text", "message"),
    [("a <|vision_pad|>", "special token"), ("Speaker 1:\nSpeaker 2: hi", "speaker 1 says is empty"), (" ", "empty")],
)
def test_wrong_texts_are_refused(text: str, message: str, prompt_processor: PromptProcessor) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_processor({"prompt": text})
