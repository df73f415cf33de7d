# SPDX-License-Identifier: Apache-2.0
"""CSM against HF's on the same weights."""

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.sampling_params import SamplingParams

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
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.model_executor.feedback import RequestInput
from vllm_omni.model_executor.layers.depth_decoder import DepthDecoder
from vllm_omni.model_executor.layers.frame_loop import FrameLoop
from vllm_omni.model_executor.layers.mimi import MimiEncoder
from vllm_omni.model_executor.models.csm.backbone import CsmFeedback, OmniCsm
from vllm_omni.model_executor.models.csm.codec import OmniCsmCodec
from vllm_omni.model_executor.prompt_processor import PromptProcessor
from vllm_omni.testing.oracles.csm import CsmReference, as_conversation

from .prompts import PROMPTS, sound

MAX_FRAMES = 60


@pytest.fixture(scope="session")
def reference(tiny_csm: Path) -> CsmReference:
    return CsmReference(tiny_csm)


@pytest.fixture(scope="module")
def prompt_processor(tiny_csm: Path) -> PromptProcessor:
    return load_prompts("csm", tiny_csm)


class TestCsm(CodeTests, CodecTests):
    @pytest.fixture(scope="class")
    def cases(self, reference: CsmReference) -> dict[str, SpeechCase]:
        spoken = {name: reference.speak(prompt, MAX_FRAMES) for name, prompt in PROMPTS.items()}
        return {name: SpeechCase(PROMPTS[name], speech.codes, speech.audio) for name, speech in spoken.items()}

    @pytest.fixture(scope="class")
    def model(
        self, tiny_csm: Path, cases: dict[str, SpeechCase], prompt_processor: PromptProcessor
    ) -> Iterator[SpeechModel]:
        with start_speaker(tiny_csm) as engine:
            yield SpeechModel(engine, prompt_processor, cases, {"temperature": 0.0, "max_tokens": MAX_FRAMES + 1})

    @pytest.fixture(scope="class")
    def codec(self, tiny_csm: Path, cases: dict[str, SpeechCase]) -> Iterator[SpeechCodec]:
        with start_codec("csm", tiny_csm, cases) as codec:
            yield codec

    def test_speech_ends_with_a_frame_of_zeros(self, model: SpeechModel, cases: dict[str, SpeechCase]) -> None:
        outputs = model.run(model.prompts)
        ended = [name for name, case in cases.items() if not case.codes[-1].any()]
        assert 2 < len(ended) < len(outputs)
        for name, output in outputs.items():
            assert output.outputs[0].finish_reason == ("stop" if name in ended else "length")
            assert len(output.outputs[0].token_ids) == cases[name].num_frames + (name not in ended)

    def test_a_sound_is_encoded_once(self, model: SpeechModel) -> None:
        def counts() -> CacheCounts:
            found = model.engine.sound_cache_counts()
            assert found is not None
            return found

        model.run(model.prompts)
        before = counts()
        model.check(model.run(model.prompts))
        after = counts()
        assert after.hits - before.hits == after.queries - before.queries > 0

    def test_ids_that_end_text_do_not_end_speech(self, model: SpeechModel) -> None:
        given = model.prompt_processor({"prompt": "a"}).as_prompt()
        request = model.engine.input_processor.process_inputs("0", given, model.params())
        assert request.sampling_params is not None
        assert request.sampling_params.all_stop_token_ids == set()


def test_the_prompt_is_that_of_hf(prompt_processor: PromptProcessor, reference: CsmReference) -> None:
    for prompt in PROMPTS.values():
        made = prompt_processor(prompt).additional_information  # type: ignore[arg-type]
        conversation = as_conversation(prompt)
        expected = reference.processor.apply_chat_template(conversation, tokenize=True, return_dict=True)
        assert made["text_ids"].tolist() == expected["input_ids"][0].tolist()
        if "input_values" in expected:
            assert torch.equal(made["sounds"], expected["input_values"].flatten())
            assert made["sound_sizes"].cumsum(0).tolist() == expected["input_values_cutoffs"][0].tolist()


@pytest.mark.parametrize(
    ("information", "field"),
    [
        ({"speaker": "ethan"}, "speaker 'ethan'"),
        ({"ref_audio": sound(1, 0)}, "ref_text"),
        ({"ref_text": "yes"}, "ref_audio"),
        ({"ref_text": "", "ref_audio": sound(1, 0)}, "ref_text"),
        ({"context": "hello"}, "context"),
        ({"context": [{"text": "hello"}]}, "context[0]"),
        ({"context": [{"text": "a", "audio": sound(1, 0), "role": "0"}]}, "context[0]"),
        ({"context": [{"text": "a", "audio": sound(1, 0), "speaker": "x"}]}, "context[0]: speaker 'x'"),
        ({"context": [{"text": "a", "audio": sound(121, 0)}]}, "context[0]"),
        ({"language": "english"}, "'language'"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    information: dict[str, Any], field: str, prompt_processor: PromptProcessor
) -> None:
    check_refused(prompt_processor, information, field)


def test_special_tokens_in_a_text_are_refused(prompt_processor: PromptProcessor) -> None:
    with pytest.raises(ValueError, match="special tokens"):
        prompt_processor({"prompt": "hello <|AUDIO|>"})


@pytest.mark.parametrize("kept", ["backbone_model.embed_tokens.embed_audio_tokens", "depth_decoder.model.embed_tokens"])
def test_one_table_of_embeddings_serves_both_decoders(kept: str, reference: CsmReference) -> None:
    """As checkpoints with `tie_codebooks_embeddings` have it."""
    weights = dict(reference.model.named_parameters())
    table = weights[f"{kept}.weight"]
    model = OmniCsm.__new__(OmniCsm)
    object.__setattr__(model, "config", reference.model.config)
    given = OmniCsm.hf_to_vllm_mapper.apply([(f"{kept}.weight", table)])
    loaded = dict(model.split_weights(given))
    assert torch.equal(loaded["model.embed_tokens.weight"], table)
    config = reference.model.config
    by_codebook = table.view(config.num_codebooks, config.vocab_size, -1)[:, : config.codec_config.codebook_size]
    assert torch.equal(loaded["first_embedding.weight"], by_codebook[0])
    assert torch.equal(loaded["depth_decoder.codec_embedding.1"], by_codebook[2])
    with pytest.raises(ValueError, match="no embeddings of codes"):
        list(model.split_weights([]))


# -- on another device ------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


class Backbone(nn.Module):
    """What the strategy reads of `OmniCsm`, with random weights."""

    def __init__(self, reference: CsmReference) -> None:
        super().__init__()
        config = reference.model.config
        self.config = config
        self.embed_text_tokens = nn.Embedding(config.text_vocab_size, config.hidden_size)
        self.frames = nn.Embedding(config.num_codebooks * config.vocab_size, config.hidden_size)
        self.first_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.depth_decoder = DepthDecoder(
            config.depth_decoder_config, config.num_codebooks, 4, input_size=config.hidden_size, has_qk_norm=False
        )
        for parameter in self.depth_decoder.parameters():
            parameter.data.normal_(std=0.3)
        self.codec = MimiEncoder(config.codec_config)
        self.codec.load(reference.model.codec_model.state_dict())
        self.register_buffer("offsets", torch.arange(config.num_codebooks) * config.vocab_size)

    def embed_frames(self, codes: torch.Tensor) -> torch.Tensor:
        return self.frames(codes + self.offsets).sum(1)


@pytest.fixture(scope="module")
def backbone(reference: CsmReference) -> Backbone:
    torch.manual_seed(0)
    return Backbone(reference)


@torch.no_grad()
def speak(backbone: Backbone, device: torch.device) -> list[torch.Tensor]:
    """Inputs and outputs of a request with two sounds, sampled, and one without, greedy."""
    model: Any = copy.deepcopy(backbone).to(device)
    strategy = CsmFeedback(model, FrameLoop(model.depth_decoder, 1, max_frames=80))
    audio, end = model.config.audio_token_id, model.config.audio_eos_token_id
    torch.manual_seed(1)
    prompts = [
        {
            "text_ids": torch.tensor([5, audio, audio, end, 9, audio, end, 7]),
            "sounds": torch.randn(1920 + 2000),
            "sound_sizes": torch.tensor([2000, 1920]),
        },
        {"text_ids": torch.tensor([3, 4]), "sounds": torch.empty(0), "sound_sizes": torch.empty(0, dtype=torch.int64)},
    ]
    for slot, params in enumerate((SamplingParams(seed=3, top_k=9), SamplingParams(temperature=0))):
        strategy.begin(slot, RequestInput([], prompts[slot], params, True))
    made = [strategy.prompt_rows(0, 1, 8), strategy.prompt_rows(1, 0, 2)]
    return made + speak_frames(strategy, model.config.hidden_size, device)


def test_inputs_and_outputs_of_the_backbone(backbone: Backbone, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(speak(backbone, DEVICE)), speak(backbone, CPU))


def decode(reference: CsmReference, device: torch.device) -> list[torch.Tensor]:
    """The waves of two requests in windows."""
    model_config = SimpleNamespace(hf_config=reference.model.config.codec_config)
    codec = OmniCsmCodec(vllm_config=SimpleNamespace(model_config=model_config))  # type: ignore[arg-type]
    weights = reference.model.codec_model.state_dict()
    codec.load_weights((f"codec_model.{name}", tensor) for name, tensor in weights.items())
    codec.to(device)
    codes = torch.randint(100, (2, 9, reference.model.config.num_codebooks), generator=torch.Generator().manual_seed(0))
    return decode_in_windows(codec, codes, (4, 9))


def test_sound_in_windows(reference: CsmReference, device: SimulatedDevice) -> None:
    torch.testing.assert_close(on_cpu(decode(reference, DEVICE)), decode(reference, CPU))
