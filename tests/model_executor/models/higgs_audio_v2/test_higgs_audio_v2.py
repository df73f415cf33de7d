# SPDX-License-Identifier: Apache-2.0
"""Higgs Audio v2 against HF's on the same weights."""

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.csm.prompts import sound
from tests.model_executor.models.speech import (
    CodecTests,
    CodeTests,
    SpeechCase,
    SpeechCodec,
    SpeechModel,
    check_refused,
    decode_in_windows,
    load_prompts,
    speak_frames,
    start_codec,
    start_speaker,
)
from tests.simulated_device import DEVICE, SimulatedDevice, on_cpu
from vllm_omni.model_executor.feedback import RequestInput
from vllm_omni.model_executor.layers.delay_pattern import DelayPattern
from vllm_omni.model_executor.models.higgs_audio_v2.backbone import OmniHiggsAudio
from vllm_omni.model_executor.models.higgs_audio_v2.codec import HiggsAudioEncoder, OmniHiggsAudioCodec
from vllm_omni.model_executor.models.higgs_audio_v2.tokenizer import CODEC
from vllm_omni.model_executor.prompt_processor import PromptProcessor
from vllm_omni.testing.oracles.higgs_audio_v2 import HiggsAudioReference

from .prompts import PROMPTS

MAX_ROWS = 60


@pytest.fixture(scope="session")
def reference(tiny_higgs_audio_v2: Path) -> HiggsAudioReference:
    return HiggsAudioReference(tiny_higgs_audio_v2)


@pytest.fixture(scope="module")
def prompt_processor(tiny_higgs_audio_v2: Path) -> PromptProcessor:
    return load_prompts("higgs_audio_v2", tiny_higgs_audio_v2)


class TestHiggsAudio(CodeTests, CodecTests):
    @pytest.fixture(scope="class")
    def cases(self, reference: HiggsAudioReference) -> dict[str, SpeechCase]:
        spoken = {name: reference.speak(prompt, MAX_ROWS) for name, prompt in PROMPTS.items()}
        return {name: SpeechCase(PROMPTS[name], speech.codes, speech.audio) for name, speech in spoken.items()}

    @pytest.fixture(scope="class")
    def model(
        self, tiny_higgs_audio_v2: Path, cases: dict[str, SpeechCase], prompt_processor: PromptProcessor
    ) -> Iterator[SpeechModel]:
        greedy = {"temperature": 0.0, "max_tokens": MAX_ROWS + 1}
        with start_speaker(tiny_higgs_audio_v2) as engine:
            yield SpeechModel(engine, prompt_processor, cases, greedy, num_fixed=2)

    @pytest.fixture(scope="class")
    def codec(self, tiny_higgs_audio_v2: Path, cases: dict[str, SpeechCase]) -> Iterator[SpeechCodec]:
        with start_codec("higgs_audio_v2", tiny_higgs_audio_v2 / CODEC, cases, num_held=4 + 10) as codec:
            yield codec

    def test_speech_ends_with_a_row_of_ends(self, model: SpeechModel, cases: dict[str, SpeechCase]) -> None:
        outputs = model.run(model.prompts)
        end = model.prompt_processor.hf_config.audio_stream_eos_id
        ended = [name for name, case in cases.items() if (case.codes[-1] == end).all()]
        assert 2 < len(ended) < len(outputs)
        for name, output in outputs.items():
            assert output.outputs[0].finish_reason == ("stop" if name in ended else "length")
            assert len(output.outputs[0].token_ids) == cases[name].num_frames + (name not in ended)


def test_the_prompt_is_that_of_hf(prompt_processor: PromptProcessor, reference: HiggsAudioReference) -> None:
    for prompt in PROMPTS.values():
        made = prompt_processor(prompt).additional_information  # type: ignore[arg-type]
        assert made["text_ids"].tolist() == reference.read_prompt(prompt)["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("information", "field"),
    [
        ({"ref_audio": sound(1, 0)}, "ref_text"),
        ({"ref_text": "yes"}, "ref_audio"),
        ({"ref_text": "", "ref_audio": sound(1, 0)}, "ref_text"),
        ({"ref_text": "yes", "ref_audio": sound(61, 0)}, "ref_audio"),
        ({"instructions": ""}, "instructions"),
        ({"instructions": "a <|AUDIO_OUT|>"}, "special tokens"),
        ({"speaker": "0"}, "'speaker'"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    information: dict[str, Any], field: str, prompt_processor: PromptProcessor
) -> None:
    check_refused(prompt_processor, information, field)


@pytest.mark.parametrize("limits", [{"ras_win_len": 17}, {"ras_win_len": 7.0}, {"ras_win_max_num_repeat": 0}])
def test_wrong_sampling_parameters_are_refused(limits: dict[str, Any], prompt_processor: PromptProcessor) -> None:
    given = {"ras_win_len": 7, "ras_win_max_num_repeat": 2}
    prompt_processor.validate(SamplingParams(extra_args=given))
    with pytest.raises(ValueError, match="ras_win_len is 1 to 16, and ras_win_max_num_repeat at least 1"):
        prompt_processor.validate(SamplingParams(extra_args=given | limits))


# -- on another device ------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
SAMPLED = SamplingParams(seed=3, top_k=9, extra_args={"ras_win_len": 7, "ras_win_max_num_repeat": 1})


class Layers(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embed_input_ids = embedding
        self.register_buffer("is_sound", torch.zeros(8, dtype=torch.bool))


class Backbone(OmniHiggsAudio):
    """What the strategy reads, with the reference's weights."""

    def __init__(self, reference: HiggsAudioReference) -> None:
        nn.Module.__init__(self)
        theirs, self.config = reference.model, reference.model.config
        self.model = Layers(theirs.model.embed_tokens)
        self.embed_audio_tokens = theirs.model.embed_audio_tokens.embed_audio_tokens
        self.audio_lm_head = theirs.audio_lm_head
        self.offsets: torch.Tensor
        self.register_buffer("offsets", theirs.model.embed_audio_tokens.audio_tokens_offsets)
        self.pattern = DelayPattern(
            self.config.num_codebooks, self.config.audio_stream_bos_id, self.config.audio_stream_eos_id
        )
        codec = reference.processor.audio_tokenizer
        self.codec = HiggsAudioEncoder(codec.config)
        self.codec.load(codec.state_dict())
        self.max_model_len = 80


@pytest.fixture(scope="module")
def backbone(reference: HiggsAudioReference) -> Backbone:
    return Backbone(reference)


@torch.no_grad()
def speak(backbone: Backbone, device: torch.device) -> list[torch.Tensor]:
    """Inputs and outputs of a request with a sound, sampled, and one without, greedy."""
    model: Any = copy.deepcopy(backbone).to(device)
    config = model.config
    strategy = model.make_feedback_strategy(1)
    num_rows = model.pattern.num_rows(2)
    torch.manual_seed(1)
    prompts = [
        {
            "text_ids": torch.tensor([5, *[config.audio_token_id] * (num_rows - 1), config.audio_delay_token_id, 7]),
            "sound": torch.randn(2000),
        },
        {"text_ids": torch.tensor([3, 4]), "sound": torch.empty(0)},
    ]
    for slot, params in enumerate((SAMPLED, SamplingParams(temperature=0))):
        strategy.begin(slot, RequestInput([], prompts[slot], params, True))
    made = [strategy.prompt_rows(0, 1, 8), strategy.prompt_mask(0, 0, 9), strategy.prompt_rows(1, 0, 2)]
    return made + speak_frames(strategy, config.hidden_size, device, num_frames=6)


def test_inputs_and_outputs_of_the_backbone(backbone: Backbone, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(speak(backbone, DEVICE)), speak(backbone, CPU))


def decode(reference: HiggsAudioReference, device: torch.device) -> list[torch.Tensor]:
    """The waves of two requests in windows."""
    theirs = reference.processor.audio_tokenizer
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=theirs.config))
    codec = OmniHiggsAudioCodec(vllm_config=config)
    codec.load_weights(theirs.state_dict().items())
    codec.to(device)
    codes = torch.randint(60, (2, 30, theirs.config.num_quantizers), generator=torch.Generator().manual_seed(0))
    return decode_in_windows(codec, codes, (4, 22, 30))


def test_sound_in_windows(reference: HiggsAudioReference, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(decode(reference, DEVICE)), decode(reference, CPU))


@pytest.fixture
def exact_codec(reference: HiggsAudioReference) -> OmniHiggsAudioCodec:
    theirs = reference.processor.audio_tokenizer
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=theirs.config))
    codec = OmniHiggsAudioCodec(vllm_config=config)
    loaded = codec.load_weights(theirs.state_dict().items())
    assert loaded == {name for name, _ in codec.named_parameters()}
    return codec.double()


def decode_rows(codec: OmniHiggsAudioCodec, codes: torch.Tensor, size: int) -> torch.Tensor:
    """The wave of delayed rows, in windows of this size."""
    state: dict[str, Any] = {}
    waves = []
    for start in range(0, len(codes), size):
        window = {"codes": codes[start : start + size], "state": state, "is_last": start + size >= len(codes)}
        waves.append(codec(torch.empty(0), torch.empty(0), runtime_additional_information=[window])[0]["audio"])
    return torch.cat(waves)


@torch.no_grad()
def test_the_context_is_all_that_a_sample_depends_on_and_no_more(exact_codec: OmniHiggsAudioCodec) -> None:
    """In double precision, where nothing else differs."""
    codec = exact_codec
    assert codec.num_context == 10 and codec.hop == 960
    codes = torch.randint(64, (50, 4), generator=torch.Generator().manual_seed(0))
    frames = codec.align(codes)
    whole = codec.model.decode(frames.T[None]).audio_values[0, 0]
    for size in (1, 7, 24):
        torch.testing.assert_close(decode_rows(codec, codes, size), whole, rtol=0, atol=1e-12)
    codec.num_context = 9
    assert (decode_rows(codec, codes, 7) - whole).abs().max() > 1e-9
