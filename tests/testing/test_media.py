# SPDX-License-Identifier: Apache-2.0
"""Synthetic media: shapes as documented, equal for equal seeds, different for others."""

from pathlib import Path

import numpy as np
import pytest

from vllm_omni.testing.media import (
    HARD_KINDS,
    PROMPT_KINDS,
    SAMPLE_RATE,
    example_prompts,
    make_audio,
    make_image,
    make_prompt,
    make_prompts,
    make_video,
    mixed_prompts,
)


@pytest.mark.parametrize("make", [lambda seed: np.asarray(make_image(seed)), make_audio, make_video])
def test_media_depend_on_the_seed(make) -> None:
    assert np.array_equal(make(3), make(3))
    assert not np.array_equal(make(3), make(4))


def test_shapes_and_ranges() -> None:
    assert make_image(width=64, height=32).size == (64, 32)
    video = make_video(frames=5, width=64, height=32)
    assert video.shape == (5, 32, 64, 3) and video.dtype == np.uint8
    assert (video[0] != video[-1]).any(), "nothing moves"
    clip = make_audio(seconds=0.5)
    assert clip.shape == (SAMPLE_RATE // 2,) and clip.dtype == np.float32
    assert abs(np.abs(clip).max() - 0.7) < 1e-6


def test_the_clip_has_pitch_and_formants() -> None:
    clip = make_audio(seconds=2.0)
    power = np.abs(np.fft.rfft(clip)) ** 2
    frequency = np.fft.rfftfreq(len(clip), 1 / SAMPLE_RATE)

    assert power[frequency < 4000].sum() > 0.95 * power.sum()
    assert power[frequency < 80].sum() < 0.01 * power.sum()


def test_prompts_have_the_keys_of_vllm(tiny_qwen3_omni_moe: Path) -> None:
    prompts = example_prompts(tiny_qwen3_omni_moe)

    assert tuple(prompts) == PROMPT_KINDS
    assert set(prompts["text"]) == {"prompt"}
    for kind in ("image", "audio", "video"):
        assert list(prompts[kind]["multi_modal_data"]) == [kind]
    assert prompts["video"]["mm_processor_kwargs"]["do_sample_frames"] is False


def test_every_placeholder_has_its_media(tiny_qwen2_5_omni: Path) -> None:
    prompts = make_prompts(tiny_qwen2_5_omni, (*PROMPT_KINDS, *HARD_KINDS))

    for kind, prompt in prompts.items():
        shown = {media: len(items) for media, items in prompt.get("multi_modal_data", {}).items()}
        if prompt.get("mm_processor_kwargs", {}).get("use_audio_in_video"):
            assert shown.pop("audio") == 1, "the sound of a video has no placeholder of its own"
        assert shown == {
            media: prompt["prompt"].count(f"<|{media.upper()}|>")
            for media in ("image", "audio", "video")
            if f"<|{media.upper()}|>" in prompt["prompt"]
        }, kind
        assert prompt["prompt"].startswith("<|im_start|>system\n")


def test_a_videos_size_is_that_of_the_checkpoints_patches(tiny_qwen2_5_omni: Path, tiny_qwen3_omni_moe: Path) -> None:
    smallest = [
        make_prompt(checkpoint, "video")["mm_processor_kwargs"]["size"]["shortest_edge"]
        for checkpoint in (tiny_qwen2_5_omni, tiny_qwen3_omni_moe)
    ]

    assert smallest == [4 * 28 * 28, 4 * 32 * 32]


def test_mixed_prompts_are_all_different(tiny_qwen3_omni_moe: Path) -> None:
    prompts = mixed_prompts(tiny_qwen3_omni_moe, 8)

    assert len({repr(prompt) + str(_sum(prompt)) for prompt in prompts}) == 8


@pytest.mark.slow
def test_prompts_of_every_kind_depend_on_the_seed(tiny_qwen3_omni_moe: Path) -> None:
    kinds = (*PROMPT_KINDS, *HARD_KINDS)
    first, second = (make_prompts(tiny_qwen3_omni_moe, kinds, seed=seed) for seed in (0, 1))

    for kind in kinds:
        assert (first[kind]["prompt"], _sum(first[kind])) != (second[kind]["prompt"], _sum(second[kind])), kind


def test_an_unknown_kind_is_refused(tiny_qwen3_omni_moe: Path) -> None:
    with pytest.raises(ValueError, match="unknown kind of prompt: 'smell'"):
        make_prompt(tiny_qwen3_omni_moe, "smell")


def _sum(prompt: dict) -> float:
    """A fingerprint of the media, because `repr` truncates them."""
    items = [item for data in prompt.get("multi_modal_data", {}).values() for item in data]
    return sum(float(np.asarray(item[0] if isinstance(item, tuple) else item).sum()) for item in items)
