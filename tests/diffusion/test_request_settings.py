# SPDX-License-Identifier: Apache-2.0
"""Settings as arguments of the pipelines that diffusers has."""

from typing import Any

import diffusers
import pytest

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.request_settings import call_arguments, check_limits, default_fps
from vllm_omni.sampling_params import DiffusionSamplingParams


def arguments(class_name: str, **settings: Any) -> dict[str, Any]:
    return call_arguments(getattr(diffusers, class_name), DiffusionSamplingParams(**settings))


def test_only_settings_that_are_set_are_passed() -> None:
    assert arguments("ZImagePipeline", seed=4, num_outputs_per_prompt=3, output_format="png", preview_every=2) == {}


def test_settings_keep_their_names() -> None:
    settings = {"negative_prompt": "", "height": 64, "width": 32, "num_inference_steps": 2, "guidance_scale": 0.0}

    assert arguments("ZImagePipeline", **settings, extra_args={"max_sequence_length": 9}) == {
        **settings,
        "max_sequence_length": 9,
    }


@pytest.mark.parametrize(
    ("class_name", "expected"),
    [("WanPipeline", {}), ("LTXPipeline", {"frame_rate": 24.0}), ("CosmosTextToWorldPipeline", {"fps": 24.0})],
)
def test_fps_is_passed_to_pipelines_that_take_it(class_name: str, expected: dict[str, float]) -> None:
    assert arguments(class_name, fps=24.0) == expected


@pytest.mark.parametrize(
    ("class_name", "expected"),
    [("WanPipeline", None), ("LTXPipeline", 25), ("StableVideoDiffusionPipeline", 7), ("ZImagePipeline", None)],
)
def test_the_default_fps_is_that_of_the_pipeline(class_name: str, expected: float | None) -> None:
    assert default_fps(getattr(diffusers, class_name)) == expected


@pytest.mark.parametrize(
    ("class_name", "settings", "words"),
    [
        ("ZImagePipeline", {"true_cfg_scale": 2.0}, ["'true_cfg_scale'", "guidance_scale", "max_sequence_length"]),
        ("ZImagePipeline", {"num_frames": 5}, ["ZImagePipeline does not take 'num_frames'"]),
        ("ZImagePipeline", {"strength": 0.5}, ["does not take 'strength'"]),
        ("Flux2KleinPipeline", {"negative_prompt": "x"}, ["Flux2KleinPipeline does not take 'negative_prompt'"]),
        ("WanPipeline", {"true_cfg_scale": 2.0}, ["does not take 'true_cfg_scale'", "num_frames"]),
        ("StableAudioPipeline", {"height": 64}, ["does not take 'height'", "audio_end_in_s"]),
        ("ZImagePipeline", {"extra_args": {"max_sequence_len": 9}}, ["did you mean 'max_sequence_length'"]),
        ("ZImagePipeline", {"extra_args": {"height": 64}}, ["'height' is a field of its own"]),
        ("LTXPipeline", {"extra_args": {"frame_rate": 8}}, ["'frame_rate'", "comes from fps"]),
        ("ZImagePipeline", {"extra_args": {"num_images_per_prompt": 2}}, ["comes from num_outputs_per_prompt"]),
        ("ZImagePipeline", {"extra_args": {"generator": 2}}, ["'generator'", "comes from seed"]),
        ("ZImagePipeline", {"extra_args": {"return_dict": False}}, ["'return_dict' is set by the stage"]),
        ("ZImagePipeline", {"extra_args": {"self": 1}}, ["does not take 'self'"]),
    ],
)
def test_what_a_pipeline_does_not_take_is_refused_by_name(
    class_name: str, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        arguments(class_name, **settings)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("class_name", "extra_args", "words"),
    [
        ("KandinskyV22CombinedPipeline", {"prior_num_inference_steps": 11}, "at most 10 (max_steps)"),
        ("LattePipeline", {"video_length": 9}, "at most 8 (max_frames)"),
        ("StableVideoDiffusionPipeline", {"decode_chunk_size": 9}, "at most 8 (max_frames)"),
        ("QwenImageLayeredPipeline", {"layers": 3}, "at most 2 (max_outputs)"),
        ("QwenImageLayeredPipeline", {"layers": 1, "resolution": 1024}, "at most 4096 pixels (max_pixels)"),
        ("VisualClozePipeline", {"upsampling_height": 65}, "at most 4096 pixels (max_pixels)"),
        ("MarigoldDepthPipeline", {"ensemble_size": 3}, "at most 2 (max_outputs)"),
        ("AceStepPipeline", {"audio_duration": 31.0}, "at most 30.0 (max_seconds)"),
        ("StableAudioPipeline", {"audio_end_in_s": float("nan")}, "at most 30.0 (max_seconds)"),
        ("FluxPipeline", {"max_sequence_length": 2000}, "at most 1024"),
        ("FluxPipeline", {"sigmas": [0.5] * 11}, "has 11 values; this stage allows at most 10 (max_steps)"),
    ],
)
def test_arguments_that_cost_have_limits(class_name: str, extra_args: dict[str, Any], words: str) -> None:
    config = DiTConfig(max_steps=10, max_frames=8, max_outputs=2, max_pixels=4096, max_seconds=30.0)
    given = DiffusionSamplingParams(height=8, width=8, num_frames=1, num_inference_steps=1, extra_args=extra_args)
    with pytest.raises(ValueError) as error:
        check_limits(given, getattr(diffusers, class_name), config)
    assert words in str(error.value)
