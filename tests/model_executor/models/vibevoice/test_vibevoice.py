# SPDX-License-Identifier: Apache-2.0
"""VibeVoice against HF's on the same weights, with the same seeds.

Nothing that is fed back is rounded to codes, so a difference in the last bit could grow from frame to frame. With the
tiny checkpoint it does not: in the reference a prompt alone and one in a padded batch, with equal noise, differ by at
most 4e-7 in each of 40 frames, the last no more than the tenth. So the bound is that of all other speech.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.csm.prompts import sound
from tests.model_executor.models.speech import SpeechModel, SpeechTests, check_refused, load_prompts, start_speaker
from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu
from vllm_omni.model_executor.feedback import FedBackRows, RequestInput
from vllm_omni.model_executor.models.vibevoice.language_model import OmniVibeVoice
from vllm_omni.model_executor.prompt_processor import PromptProcessor
from vllm_omni.testing.oracles.vibevoice import Speech, VibeVoiceReference

from .prompts import PROMPTS

MAX_FRAMES = 40
SEED = 3
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def reference(tiny_vibevoice: Path) -> VibeVoiceReference:
    return VibeVoiceReference(tiny_vibevoice)


@dataclass(frozen=True)
class Case:
    prompt: dict[str, Any]
    speech: Speech

    @property
    def num_frames(self) -> int:
        return len(self.speech.token_ids)

    def check(self, output: Any) -> None:
        assert list(output.outputs[0].token_ids)[:MAX_FRAMES] == self.speech.token_ids
        torch.testing.assert_close(output.multimodal_output["audio"], self.speech.audio, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def prompt_processor(tiny_vibevoice: Path) -> PromptProcessor:
    return load_prompts("vibevoice", tiny_vibevoice)


@pytest.fixture(scope="module")
def cases(reference: VibeVoiceReference) -> dict[str, Case]:
    return {name: Case(prompt, reference.speak(prompt, MAX_FRAMES, SEED)) for name, prompt in PROMPTS.items()}


def _fail(*args: Any) -> None:
    raise RuntimeError("it listens to nothing")


class TestVibeVoice(SpeechTests):
    @pytest.fixture(scope="class")
    def model(
        self, tiny_vibevoice: Path, cases: dict[str, Case], prompt_processor: PromptProcessor
    ) -> Iterator[SpeechModel]:
        """Room for two requests of several seconds."""
        greedy = {"temperature": 0.0, "max_tokens": MAX_FRAMES + 1, "seed": SEED}
        with start_speaker(tiny_vibevoice, engine_output_type="audio") as engine:
            yield SpeechModel(engine, prompt_processor, cases, greedy)

    def test_another_seed_is_other_speech(self, model: SpeechModel) -> None:
        prompts = {"words": PROMPTS["words"], "other seed": PROMPTS["words"]}
        outputs = model.run(prompts, own={"other seed": {"seed": SEED + 1}})
        model.check(outputs)
        other, own = (outputs[name].multimodal_output["audio"] for name in ("other seed", "words"))
        assert other.shape != own.shape or (other - own).abs().max() > 0.01

    def test_a_step_that_raises_runs_again(self, model: SpeechModel, monkeypatch: pytest.MonkeyPatch) -> None:
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
        model.check(outputs)


def test_the_references_error_is_still_there(
    reference: VibeVoiceReference, cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It guides tokens, too."""
    monkeypatch.delattr(reference.model, "_get_logits_processor")
    assert any(
        reference.speak(PROMPTS[name], MAX_FRAMES, SEED).token_ids != cases[name].speech.token_ids
        for name in ("words", "voice", "voices")
    )


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
    ("information", "field"),
    [
        ({"ref_text": "yes"}, "'ref_text'"),
        ({"instructions": "loud"}, "'instructions'"),
        ({"ref_audio": sound(61, 0)}, "ref_audio"),
        ({"speaker": "ann"}, "speaker 'ann'"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"context": {}}, "context"),
        ({"context": [{"speaker": "1"}]}, "context[0]"),
        ({"context": [{"speaker": "1", "audio": sound(1, 0)}]}, "speaker 1"),
        ({"ref_audio": sound(1, 0), "context": [{"audio": sound(1, 0)}]}, "speaker 0"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    information: dict[str, Any], field: str, prompt_processor: PromptProcessor
) -> None:
    check_refused(prompt_processor, information, field)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a <|vision_pad|>", "special token"), ("Speaker 1:\nSpeaker 2: hi", "speaker 1 says is empty"), (" ", "empty")],
)
def test_wrong_texts_are_refused(text: str, message: str, prompt_processor: PromptProcessor) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_processor({"prompt": text})


# -- on another device ------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


class Model(OmniVibeVoice):
    """What the strategy reads, with the reference's weights."""

    def __init__(self, reference: VibeVoiceReference) -> None:
        nn.Module.__init__(self)
        theirs = reference.model
        self.config = theirs.config
        self.max_model_len = 80
        self.embedding = theirs.model.language_model.embed_tokens
        for name in (
            *("audio_tower", "semantic_tokenizer_encoder", "multi_modal_projector", "semantic_connector"),
            *("diffusion_head", "latent_scaling_factor", "latent_bias_factor"),
        ):
            setattr(self, name, getattr(theirs.model, name))
        self.head = nn.Parameter(theirs.lm_head.weight[:3])
        self.num_steps = 3
        self.solver = theirs._build_default_noise_scheduler(theirs.generation_config)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)


@pytest.fixture(scope="module")
def model(reference: VibeVoiceReference) -> Model:
    return Model(reference)


@torch.no_grad()
def speak(model: Model, device: torch.device) -> list[torch.Tensor]:
    """Inputs and outputs of a request with two voices, guided, and one without."""
    moved: Any = copy.deepcopy(model).to(device)
    config = moved.config
    strategy = moved.make_feedback_strategy(1)
    torch.manual_seed(1)
    frame = config.audio_token_id
    prompts = [
        {
            "text_ids": torch.tensor([5, frame, frame, 7, frame]),
            "sounds": torch.randn(8000),
            "sound_sizes": torch.tensor([5000, 3000]),
            "scale": 1.3,
        },
        {
            "text_ids": torch.tensor([3, 4]),
            "sounds": torch.zeros(0),
            "sound_sizes": torch.zeros(0, dtype=torch.int64),
            "scale": 1.0,
        },
    ]
    for slot, information in enumerate(prompts):
        params = SamplingParams(temperature=0, seed=slot)
        strategy.begin(slot, RequestInput([], information, params, True))
    made = [strategy.prompt_rows(0, 1, 5), strategy.prompt_rows(1, 0, 2), strategy.twin_rows(0, 1)]
    slots = torch.tensor([1, 0], device=device)
    for number in range(3):
        states = torch.randn(3, config.text_config.hidden_size).to(device)
        strategy.save_hidden_states(slots, states[:2])
        strategy.save_twin_states(slots[1:], states[2:])
        rows = FedBackRows(torch.tensor([frame, frame], device=device), slots, torch.full((2,), number, device=device))
        fed_back, again = strategy.feed_back(rows), strategy.replay(rows)
        made += [fed_back.embeds, fed_back.outputs["audio"], again.embeds, again.outputs["audio"]]
    strategy.end(0)
    return made


def test_inputs_and_outputs(model: Model, device: SimulatedDevice) -> None:
    made = on_cpu(speak(model, DEVICE))
    torch.testing.assert_close(made, speak(model, CPU))
    assert torch.equal(made[-4], made[-2]) and torch.equal(made[-3], made[-1])
