# SPDX-License-Identifier: Apache-2.0
"""CSM against HF's on the same weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.models.speech import (
    CodecTests,
    CodeTests,
    SpeechCase,
    SpeechCodec,
    SpeechModel,
    check_refused,
    load_prompts,
    start_codec,
    start_speaker,
)
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.model_executor.models.csm.backbone import OmniCsm
from vllm_omni.model_executor.prompt_processor import PromptProcessor
from vllm_omni.testing.oracles.csm import CsmReference, as_conversation

from .prompts import PROMPTS, sound

MAX_FRAMES = 60


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
