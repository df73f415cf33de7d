# SPDX-License-Identifier: Apache-2.0
"""Images and videos in messages, and the settings of a diffusion model in a request."""

import base64
import functools
import io
import math
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.media_output import message_fields
from vllm_omni.entrypoints.openai.stage_params import diffusion_settings
from vllm_omni.media import encode_outputs
from vllm_omni.outputs import OmniRequestOutput, StageOutput
from vllm_omni.sampling_params import DiffusionSamplingParams


def made(output_type: str, output_format: Any, *shape: int, **settings: Any) -> OmniRequestOutput:
    """Two outputs of a diffusion stage: the first black, the second white."""
    params = DiffusionSamplingParams(output_format=output_format, **settings)
    tensors, data = encode_outputs(output_type, [torch.zeros(*shape, 3), torch.ones(*shape, 3)], params, None)
    return OmniRequestOutput("r", StageOutput(request_id="r", stage_id=0, tensors=tensors, data=data), output_type, [])


def opened(url: str, media_type: str) -> io.BytesIO:
    prefix = f"data:{media_type};base64,"
    assert url.startswith(prefix)
    return io.BytesIO(base64.b64decode(url.removeprefix(prefix)))


NESTED: Any = functools.reduce(lambda inner, _: [inner], range(5000), 1.0)


@pytest.mark.parametrize("output_format", ["pil", "np", "png", "jpeg", "webp"])
def test_images_in_any_form_are_data_uris_of_files(output_format: str) -> None:
    ((name, parts),) = message_fields(made("image", output_format, 8, 8)).items()

    file_format = output_format if output_format in ("jpeg", "webp") else "png"
    images = [Image.open(opened(part["image_url"]["url"], f"image/{file_format}")) for part in parts]
    assert [part["type"] for part in parts] == ["image_url"] * 2
    assert [image.format for image in images] == [file_format.upper()] * 2
    assert [round(float(np.asarray(image).mean())) for image in images] == [0, 255]
    assert name == "images"


@pytest.mark.parametrize("output_format", ["pil", "np", "mp4"])
def test_videos_in_any_form_are_data_uris_of_mp4s(output_format: str) -> None:
    ((name, parts),) = message_fields(made("video", output_format, 4, 16, 16, fps=8.0)).items()

    for part, brightness in zip(parts, (0, 255), strict=True):
        with av.open(opened(part["video_url"]["url"], "video/mp4")) as container:
            assert container.streams.video[0].average_rate == 8
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == 4 and all(abs(float(frame.mean()) - brightness) < 4 for frame in frames)
    assert name == "videos"


@pytest.mark.parametrize("output_format", ["np", "mp4"])
def test_videos_of_a_message_have_their_sound(output_format: Any) -> None:
    params = DiffusionSamplingParams(output_format=output_format, fps=8.0)
    sounds = [torch.full((2, 8000), level) for level in (0.0, 0.5)]
    tensors, data = encode_outputs("video", [torch.zeros(4, 16, 16, 3)] * 2, params, 16_000, sounds)
    output = StageOutput(request_id="r", stage_id=0, tensors=tensors, data=data)

    parts = message_fields(OmniRequestOutput("r", output, "video", []))["videos"]

    for part, level in zip(parts, (0.0, 0.5), strict=True):
        with av.open(opened(part["video_url"]["url"], "video/mp4")) as container:
            samples = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
        assert abs(float(np.median(samples)) - level) < 0.01


def test_settings_are_read_from_both_places() -> None:
    settings = diffusion_settings(
        {"height": 64, "messages": [], "seed": None, "extra_body": {"width": 32, "seed": 7, "guidance_scale": 1}}
    )

    assert settings == {"height": 64, "width": 32, "seed": 7, "guidance_scale": 1.0}
    assert diffusion_settings({}) == diffusion_settings({"extra_body": None}) == {}


@pytest.mark.parametrize(
    ("extra", "parameter", "words"),
    [
        ({"extra_body": {"heigth": 64}}, "extra_body.heigth", "did you mean 'height'"),
        ({"extra_body": {"extra_args": {"max_sequence_length": 1 << 30}}}, "extra_args", "above 10000"),
        ({"extra_args": {"joint_attention_kwargs": {"scale": 1}}}, "extra_args", "is an object"),
        ({"extra_args": {"sigmas": [[0.1] * 600] * 2}}, "extra_args", "more than 1000 values"),
        ({"extra_args": {"sigmas": NESTED}}, "extra_args", "lists in"),
        ({"extra_args": {"lyrics": "la " * 20_000}}, "extra_args", "more than 32000 characters"),
        ({"extra_body": {"preview_every": 1}}, "extra_body.preview_every", "operator"),
        ({"extra_body": [1]}, "extra_body", "must be an object"),
        ({"height": 64, "extra_body": {"height": 32}}, "height", "two values"),
        ({"extra_body": {"height": "64"}}, "height", "Expected `int"),
        ({"extra_body": {"height": 0}}, "height", "1 or more"),
        ({"extra_body": {"guidance_scale": math.nan}}, "guidance_scale", "finite"),
        ({"extra_body": {"negative_prompt": "\ud800"}}, "negative_prompt", "not valid Unicode"),
        ({"output_format": "latent"}, "output_format", "not for HTTP"),
        ({"extra_body": {"strength": 1.5}}, "strength", "1 or less"),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, Any], parameter: str, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as error:
        diffusion_settings(extra)
    assert error.value.parameter == parameter
