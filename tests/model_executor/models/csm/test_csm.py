# SPDX-License-Identifier: Apache-2.0
"""CSM against HF's on the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_executor.models.speech import CodecTests, SpeechCase, SpeechCodec, SpeechModel, SpeechTests
from vllm_omni.config.stage_config import PipelineConfig
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.metrics.stats import CacheCounts
from vllm_omni.model_executor.models.csm.backbone import OmniCsm
from vllm_omni.model_executor.prompt_processor import PromptProcessor, load_prompt_processor
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor
from vllm_omni.testing.oracles.csm import CsmReference, as_conversation

from .prompts import PROMPTS, sound

MAX_FRAMES = 60


@pytest.fixture(scope="module")
def prompt_processor(tiny_csm: Path, pipeline: PipelineConfig) -> PromptProcessor:
    processor = load_prompt_processor(pipeline.stages[0], str(tiny_csm))
    assert processor is not None
    return processor


class TestCsm(SpeechTests, CodecTests):
    @pytest.fixture(scope="class")
    def model(
        self, reference: CsmReference, prompt_processor: PromptProcessor, backbone_engine: OmniLLMEngine
    ) -> SpeechModel:
        spoken = {name: reference.speak(prompt, MAX_FRAMES) for name, prompt in PROMPTS.items()}
        cases = {name: SpeechCase(PROMPTS[name], speech.codes, speech.audio) for name, speech in spoken.items()}
        greedy = {"temperature": 0.0, "max_tokens": MAX_FRAMES + 1}
        return SpeechModel(backbone_engine, prompt_processor, cases, greedy)

    @pytest.fixture(scope="class")
    def codec(self, tiny_csm: Path, pipeline: PipelineConfig, codec_engine: OmniLLMEngine) -> SpeechCodec:
        input_processor = load_stage_input_processor(pipeline.stages[1], str(tiny_csm))
        assert input_processor is not None
        return SpeechCodec(codec_engine, input_processor)

    def test_speech_ends_with_a_frame_of_zeros(self, model: SpeechModel) -> None:
        outputs = model.run(model.prompts)
        ended = [name for name, case in model.cases.items() if not case.codes[-1].any()]
        assert 2 < len(ended) < len(outputs)
        for name, output in outputs.items():
            assert output.outputs[0].finish_reason == ("stop" if name in ended else "length")
            assert len(output.outputs[0].token_ids) == len(model.cases[name].codes) + (name not in ended)

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
    ("information", "message"),
    [
        ({"speaker": "ethan"}, "unknown speaker 'ethan'; this checkpoint has 0, 1"),
        ({"ref_audio": sound(1, 0)}, "give both, or none"),
        ({"ref_text": "yes"}, "give both, or none"),
        ({"ref_text": "", "ref_audio": sound(1, 0)}, "ref_text is empty"),
        ({"context": "hello"}, "context must be a list of turns, not str"),
        ({"context": [{"text": "hello"}]}, r"context\[0\] must be a dict with text and audio"),
        ({"context": [{"text": "a", "audio": sound(1, 0), "role": "0"}]}, r"context\[0\] must be a dict"),
        ({"context": [{"text": "a", "audio": sound(1, 0), "speaker": "x"}]}, r"unknown context\[0\]: speaker 'x'"),
        ({"context": [{"text": "a", "audio": sound(121, 0)}]}, r"context\[0\] must be a sound of at most 120 s"),
        ({"language": "english"}, "reads no 'language'"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    information: dict[str, Any], message: str, prompt_processor: PromptProcessor
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        prompt_processor({"prompt": "hello", "additional_information": information})


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
    loaded = dict(model._split(given, {}))
    assert torch.equal(loaded["model.embed_tokens.weight"], table)
    config = reference.model.config
    by_codebook = table.view(config.num_codebooks, config.vocab_size, -1)[:, : config.codec_config.codebook_size]
    assert torch.equal(loaded["first_embedding.weight"], by_codebook[0])
    assert torch.equal(loaded["depth_decoder.codec_embedding.1"], by_codebook[2])
    with pytest.raises(ValueError, match="no embeddings of codes"):
        list(model._split([], {}))
