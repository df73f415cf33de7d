# SPDX-License-Identifier: Apache-2.0
"""Media of a request beside its images: what a pipeline takes, what is refused, and what the stage gets."""

from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.input_sounds import SoundFormat
from vllm_omni.diffusion.media_inputs import media_arguments, read_media, restore

CONFIG = DiTConfig(max_pixels=64 * 64, max_frames=4, max_seconds=4.0)
PHOTO = Image.new("RGB", (8, 4), "red")
FRAMES = np.random.default_rng(0).integers(0, 256, (3, 4, 8, 3), np.uint8)


STEREO = SoundFormat(48_000, 2)


def passed(class_name: str, **given: Any) -> dict[str, Any]:
    """The arguments of the pipeline's call."""
    pipeline_class = getattr(diffusers, class_name)
    known = media_arguments(pipeline_class)
    read = read_media(given, pipeline_class, CONFIG, STEREO)
    return {name: restore(value, known[name]) for name, value in read.items()}


@pytest.mark.parametrize(
    ("class_name", "names"),
    [
        ("FluxPipeline", []),
        ("FluxFillPipeline", ["image", "mask_image"]),
        ("StableDiffusionXLControlNetInpaintPipeline", ["image", "mask_image", "control_image"]),
        ("WanImageToVideoPipeline", ["image", "image_embeds", "last_image"]),
        ("WanAnimatePipeline", ["image", "image_embeds", "pose_video", "face_video", "background_video", "mask_video"]),
        ("WanVACEPipeline", ["video", "mask", "reference_images"]),
        ("LTX2ConditionPipeline", ["conditions"]),
        ("AceStepPipeline", ["src_audio", "reference_audio"]),
        ("StableDiffusionPipeline", []),  # latents, embeddings and IP adapters are no media
    ],
)
def test_the_media_of_a_signature(class_name: str, names: list[str]) -> None:
    assert sorted(media_arguments(getattr(diffusers, class_name))) == sorted(names)


def test_pictures_stay_pil_images() -> None:
    grey = Image.fromarray(FRAMES[0, ..., 0])
    one = passed("FluxFillPipeline", mask_image=grey)["mask_image"]
    assert one.mode == "L" and one.tobytes() == grey.tobytes()
    assert passed("FluxFillPipeline", mask_image=grey.point(lambda v: v > 99, "1"))["mask_image"].mode == "L"
    assert passed("FluxFillPipeline", mask_image=FRAMES[0])["mask_image"].tobytes() == FRAMES[0].tobytes()
    half = Image.new("RGBA", (8, 4), (0, 0, 0, 0))
    assert passed("FluxControlPipeline", control_image=half)["control_image"].getpixel((0, 0)) == (255,) * 3


@pytest.mark.parametrize(
    "video", [FRAMES, torch.from_numpy(FRAMES), FRAMES.astype(np.float32) / 255, [Image.fromarray(f) for f in FRAMES]]
)
def test_a_video_is_a_list_of_frames(video: Any) -> None:
    frames = passed("WanVideoToVideoPipeline", video=video)["video"]
    assert [np.asarray(frame).tolist() for frame in frames] == FRAMES.tolist()


def test_tensors_have_the_pipelines_own_format() -> None:
    mask = torch.rand(1, 1, 4, 8)
    torch.testing.assert_close(passed("FluxFillPipeline", mask_image=mask)["mask_image"], mask)
    sound = passed("AceStepPipeline", src_audio=np.ones((2, 100), np.float32))["src_audio"]
    assert isinstance(sound, torch.Tensor) and sound.shape == (2, 100)


RAMP = np.linspace(-1, 1, 480, dtype=np.float32)


@pytest.mark.parametrize(
    ("wave", "left", "right"),
    [
        (RAMP, RAMP, RAMP),
        (torch.from_numpy(np.stack([RAMP, -RAMP])), RAMP, -RAMP),
        (np.stack([RAMP, -RAMP], axis=1), RAMP, -RAMP),
        (np.stack([RAMP, 0 * RAMP, -RAMP]), 0 * RAMP, 0 * RAMP),
        ((RAMP * 32767).astype(np.int16), RAMP, RAMP),
    ],
)
def test_a_sound_has_the_rate_and_the_channels_of_the_model(wave: Any, left: np.ndarray, right: np.ndarray) -> None:
    sound = passed("AceStepPipeline", src_audio=(wave, 48_000))["src_audio"].numpy()
    np.testing.assert_allclose(sound, np.stack([left, right]), atol=1e-4)
    resampled = passed("AceStepPipeline", reference_audio=(wave, 24_000.0))["reference_audio"]
    assert resampled.dtype == torch.float32 and resampled.shape == (2, 960)
    batched = passed("StableAudio3AudioToAudioPipeline", audio=(wave, 48_000))["audio"]
    assert batched.shape == (1, 2, 480)


def test_a_sound_of_a_model_whose_rate_is_unknown_is_a_tensor() -> None:
    pipeline_class = diffusers.AceStepPipeline
    with pytest.raises(ValueError, match="src_audio: this checkpoint's rate of sounds is unknown"):
        read_media({"src_audio": (RAMP, 48_000)}, pipeline_class, CONFIG)


def test_dicts_are_dataclasses() -> None:
    given = [{"frames": PHOTO, "index": -1, "strength": 0.5}, LTX2VideoCondition(frames=PHOTO)]
    one, other = passed("LTX2ConditionPipeline", conditions=given)["conditions"]
    assert isinstance(one, LTX2VideoCondition) and (one.index, one.strength) == (-1, 0.5)
    assert (other.index, other.strength, other.frames.size) == (0, 1.0, (8, 4))
    assert isinstance(passed("LTX2ConditionPipeline", conditions=given[0])["conditions"], LTX2VideoCondition)


def test_a_single_picture_is_in_a_list_where_a_pipeline_takes_lists_only() -> None:
    (one,) = passed("JoyImageEditPlusPipeline", images=PHOTO)["images"]
    assert one.size == (8, 4)
    assert len(passed("JoyImageEditPlusPipeline", images=[PHOTO, PHOTO])["images"]) == 2


def test_rows_of_images_may_have_places_that_the_pipeline_fills() -> None:
    rows = passed("VisualClozePipeline", image=[[PHOTO, FRAMES[0]], (PHOTO, None)])["image"]
    assert [[getattr(image, "size", None) for image in row] for row in rows] == [[(8, 4), (8, 4)], [(8, 4), None]]


@pytest.mark.parametrize(
    ("class_name", "given", "words"),
    [
        ("FluxFillPipeline", {"mask_image": "m.png"}, ["mask_image is a str; open it first", "takes", "image, mask"]),
        ("FluxFillPipeline", {"mask_image": 5}, ["mask_image is a int", "FluxFillPipeline takes tensors"]),
        ("WanVideoToVideoPipeline", {"video": torch.rand(1, 3, 4)}, ["video is a Tensor", "takes PIL images"]),
        ("AceStepPipeline", {"src_audio": PHOTO}, ["src_audio is a Image", "takes tensors", "reference_audio"]),
        ("FluxFillPipeline", {"mask_image": {"a": 1}}, ["mask_image is a dict"]),
        ("FluxFillPipeline", {"mask_image": Image.new("L", (65, 64))}, ["mask_image is 64 x 65", "max_pixels"]),
        ("FluxFillPipeline", {"mask_image": torch.zeros(1, 1, 65, 64)}, ["mask_image is 65 x 64", "max_pixels"]),
        ("FluxFillPipeline", {"mask_image": Image.new("F", (4, 4))}, ["mask_image has mode 'F'"]),
        ("FluxFillPipeline", {"mask_image": torch.zeros(4, 4, device="meta")}, ["without plain values"]),
        ("WanVideoToVideoPipeline", {"video": np.zeros((5, 4, 4, 3), np.uint8)}, ["more than 4 frames", "max_frames"]),
        ("WanVideoToVideoPipeline", {"video": [PHOTO, None]}, ["video is a NoneType", "takes PIL images"]),
        ("WanVideoToVideoPipeline", {"video": [PHOTO] * 5}, ["more than 4 frames", "max_frames"]),
        ("WanVideoToVideoPipeline", {"video": np.full((1, 4, 4, 3), 2.0)}, ["outside [0, 1]"]),
        ("WanVideoToVideoPipeline", {"video": np.zeros((2, 3, 4, 5))}, ["shape [2, 3, 4, 5]", "[frames, height"]),
        ("LTX2ConditionPipeline", {"conditions": {"frame": PHOTO}}, ["LTX2VideoCondition has no 'frame'", "'frames'"]),
        ("LTX2ConditionPipeline", {"conditions": {"index": 1}}, ["LTX2VideoCondition needs frames"]),
        (
            "LTX2ConditionPipeline",
            {"conditions": {"frames": PHOTO, "index": "a"}},
            ["conditions: index: Expected `int`"],
        ),
        ("LTX2ConditionPipeline", {"conditions": {"frames": "a.png"}}, ["conditions is a str; open it first"]),
        ("AceStepPipeline", {"src_audio": "a.wav"}, ["src_audio is a str", "(waveform, samples per second)"]),
        ("AceStepPipeline", {"src_audio": (RAMP, 10)}, ["src_audio: 10 is no number of samples per second"]),
        ("AceStepPipeline", {"src_audio": (RAMP[:0], 48_000)}, ["src_audio has 0 s"]),
        (
            "AceStepPipeline",
            {"src_audio": (np.zeros(5000, np.float32), 1000)},
            ["has 5 s", "at most 4 s (max_seconds)"],
        ),
        ("AceStepPipeline", {"src_audio": (RAMP + np.nan, 48_000)}, ["not finite"]),
        ("AceStepPipeline", {"src_audio": (np.zeros((9, 10), np.float32), 48_000)}, ["[9, 10]", "at most 8 channels"]),
        ("AceStepPipeline", {"src_audio": (np.zeros((2, 2, 2), np.float32), 48_000)}, ["must be numbers [samples]"]),
        ("LTX2ConditionPipeline", {"conditions": PHOTO}, ["takes dicts with frames, index, strength"]),
    ],
)
def test_what_a_pipeline_does_not_take_is_refused(class_name: str, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        passed(class_name, **given)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)
