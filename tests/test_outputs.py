# SPDX-License-Identifier: Apache-2.0
"""`OmniRequestOutput`: the output of a final stage for callers."""

import numpy as np
import pytest
import torch
from PIL import Image

from vllm_omni.media import encode_outputs
from vllm_omni.outputs import OmniRequestOutput, StageOutput, merge_stage_outputs
from vllm_omni.sampling_params import DiffusionSamplingParams


def received(output_type: str, outputs: list[torch.Tensor], output_format: str | None = None) -> OmniRequestOutput:
    """The output of a diffusion stage, with two progress segments before it."""
    params = DiffusionSamplingParams(output_format=output_format)
    tensors, data = encode_outputs(output_type, outputs, params, 44_100)
    preview = {"image": torch.ones(2, 2, 3, dtype=torch.uint8)}
    pieces = [
        StageOutput(request_id="r", stage_id=0, step=0, num_steps=2, data={"index": 0}, is_last=False),
        StageOutput(request_id="r", stage_id=0, step=1, num_steps=2, data={"index": 1}, tensors=preview, is_last=False),
        StageOutput(request_id="r", stage_id=0, tensors=tensors, data=data),
    ]
    return OmniRequestOutput("r", merge_stage_outputs(pieces), output_type, [])


PICTURE = torch.zeros(8, 12, 3)
FILM = torch.zeros(4, 8, 12, 3)


@pytest.mark.parametrize(
    ("output_format", "kind"),
    [
        ("pil", Image.Image),
        ("np", np.ndarray),
        ("png", bytes),
        ("jpeg", bytes),
        ("webp", bytes),
        ("latent", torch.Tensor),
    ],
)
def test_images(output_format, kind):
    output = received("image", [PICTURE, PICTURE, PICTURE], output_format)
    assert [isinstance(image, kind) for image in output.images] == [True] * 3
    assert output.images is output.images
    assert output.videos == []
    assert f"images=<3 {output_format}>" in repr(output)


@pytest.mark.parametrize(
    ("output_format", "kind"), [("pil", list), ("np", np.ndarray), ("mp4", bytes), ("latent", torch.Tensor)]
)
def test_videos(output_format, kind):
    output = received("video", [FILM, FILM], output_format)
    assert [isinstance(video, kind) for video in output.videos] == [True] * 2
    assert output.images == []
    assert output.fps == 16
    assert f"videos=<2 {output_format}>" in repr(output)


def test_audio():
    output = received("audio", [torch.zeros(2, 50)] * 3)
    assert output.multimodal_output["audio"].shape == (3, 2, 50)
    assert output.sample_rate == 44_100
    assert (output.images, output.videos, output.fps) == ([], [], None)
    assert repr(output).endswith("multimodal_output={'audio': (3, 2, 50)})")


def test_latents_of_audio_are_not_images():
    output = received("audio", [torch.zeros(2, 50)], "latent")
    assert (output.images, output.videos) == ([], [])
    assert output.multimodal_output["latents"].shape == (1, 2, 50)


def test_the_sample_rate_of_speech_is_that_of_the_configuration():
    output = StageOutput(request_id="r", stage_id=2, tensors={"audio": torch.zeros(50)})
    assert OmniRequestOutput("r", output, "audio", [], 24_000).sample_rate == 24_000
    assert OmniRequestOutput("r", output, "audio", []).sample_rate is None


@pytest.mark.parametrize(
    "data",
    [
        {"output_type": "image"},
        {"output_type": "image", "output_format": "tiff"},
        {"output_type": ["image"], "output_format": "pil"},
        {"output_type": "image", "output_format": "pil", "sample_rate": "high"},
    ],
)
def test_data_of_a_function_stage_is_not_an_image(data):
    output = StageOutput(request_id="r", stage_id=0, tensors={"rows": torch.zeros(3)}, data=data)
    received = OmniRequestOutput("r", output, "image", [])
    assert (received.images, received.videos, received.sample_rate) == ([], [], None)
    assert "rows" in repr(received)
