# SPDX-License-Identifier: Apache-2.0
"""Media from the cache of preprocessed media are what the processor makes of them without it."""

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.engine_args import create_config_for_inputs, create_engine_args
from vllm_omni.engine.input_processor import OmniInputProcessor
from vllm_omni.testing.media import SAMPLE_RATE, make_audio, make_prompt, make_video

ARCHITECTURES = {
    "tiny_qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "tiny_qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def make_processor(request):
    path = request.getfixturevalue(request.param)

    def make(cache_gb: float) -> OmniInputProcessor:
        arguments = create_engine_args(
            str(path),
            model_arch=ARCHITECTURES[request.param],
            engine_output_type="latent",
            enable_prefix_caching=True,
            dtype="float32",
            max_model_len=2048,
            mm_processor_cache_gb=cache_gb,
        )
        return OmniInputProcessor(create_config_for_inputs(arguments))

    make.path = path
    return make


@pytest.fixture(scope="module")
def without_cache(make_processor) -> OmniInputProcessor:
    return make_processor(0)


@pytest.fixture(scope="module")
def with_cache(make_processor) -> OmniInputProcessor:
    return make_processor(1)


@pytest.fixture
def processor(with_cache) -> OmniInputProcessor:
    """With an empty cache."""
    cache = with_cache.renderer._mm_processor_only_cache
    cache.clear_cache()
    cache.make_stats(delta=True)
    return with_cache


def video_prompt(path, video: int, sound: int, seconds: float, **options: Any) -> dict[str, Any]:
    prompt = make_prompt(path, "audio_in_video")
    prompt["multi_modal_data"] = {"video": [make_video(video)], "audio": [(make_audio(sound, seconds), SAMPLE_RATE)]}
    prompt["mm_processor_kwargs"] = prompt["mm_processor_kwargs"] | options
    return prompt


def process(processor: OmniInputProcessor, prompt: dict[str, Any]):
    return processor.process_inputs("0", prompt, SamplingParams(max_tokens=1))


def hits(processor: OmniInputProcessor) -> tuple[int, int]:
    """Items found, and items looked for, since the last call."""
    stats = processor.renderer._mm_processor_only_cache.make_stats(delta=True)
    return stats.hits, stats.total


def assert_equal(found, expected) -> None:
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert len(found.mm_features) == len(expected.mm_features)
    for one, other in zip(found.mm_features, expected.mm_features, strict=True):
        assert (one.modality, one.identifier, one.mm_position) == (other.modality, other.identifier, other.mm_position)
        assert one.data.keys() == other.data.keys()
        for name, element in one.data.items():
            assert torch.equal(torch.as_tensor(element.data), torch.as_tensor(other.data[name].data)), name


@pytest.mark.parametrize("kind", ["mixed", "turns", "audio_in_video"])
def test_a_later_turn_finds_its_media(make_processor, processor, without_cache, kind) -> None:
    prompt = make_prompt(make_processor.path, kind)
    expected = process(without_cache, prompt)
    assert_equal(process(processor, prompt), expected)
    num_items = len(expected.mm_features)
    assert hits(processor) == (0, num_items)
    assert_equal(process(processor, prompt), expected)
    assert hits(processor) == (num_items, num_items)


def test_a_video_with_other_sound_is_another_video(make_processor, processor, without_cache) -> None:
    path = make_processor.path
    prompts = [video_prompt(path, 1, 1, 1.5), video_prompt(path, 1, 2, 1.5), video_prompt(path, 1, 1, 2.6)]
    prompts.append(video_prompt(path, 2, 1, 1.5))
    for prompt in prompts:
        assert_equal(process(processor, prompt), process(without_cache, prompt))
    assert hits(processor) == (0, 8)
    for prompt in reversed(prompts):
        assert_equal(process(processor, prompt), process(without_cache, prompt))
    assert hits(processor) == (8, 8)


def test_a_video_that_has_lost_its_sound(make_processor, processor, without_cache) -> None:
    prompt = video_prompt(make_processor.path, 1, 1, 1.5)
    first = process(processor, prompt)
    cache = processor.renderer._mm_processor_only_cache._cache
    (sound,) = [feature.mm_hash for feature in first.mm_features if feature.modality == "audio"]
    cache.pop(sound)
    assert_equal(process(processor, prompt), process(without_cache, prompt))
