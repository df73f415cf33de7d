# SPDX-License-Identifier: Apache-2.0
"""`OmniRequestOutput`: the output of a final stage for callers."""

import base64
import io
import re
from collections.abc import Sequence

import av
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from vllm_omni.errors import RequestError
from vllm_omni.media import encode_outputs
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import (
    Completion,
    OmniRequestOutput,
    StageOutput,
    Trajectory,
    merge_stage_outputs,
    pack_trajectories,
)
from vllm_omni.sampling_params import DiffusionSamplingParams


def received(
    output_type: str,
    outputs: list[torch.Tensor],
    output_format: str | None = None,
    trajectories: Sequence[Trajectory] = (),
) -> OmniRequestOutput:
    """The output of a diffusion stage, with two progress segments before it."""
    params = DiffusionSamplingParams(output_format=output_format)
    tensors, data = encode_outputs(output_type, outputs, params, 44_100)
    tensors |= pack_trajectories(trajectories)
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


@pytest.mark.parametrize(("output_type", "output_format"), [("image", "pil"), ("image", "png"), ("video", "mp4")])
def test_media_with_their_trajectories(output_type, output_format):
    trajectories = [Trajectory(*torch.rand(5, 2)) for _ in range(2)]
    output = received(output_type, [PICTURE if output_type == "image" else FILM] * 2, output_format, trajectories)
    assert len(output.images or output.videos) == 2
    for found, trajectory in zip(output.trajectories, trajectories, strict=True):
        assert torch.equal(found.latents, trajectory.latents) and torch.equal(found.std, trajectory.std)


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


# -- in a notebook ----------------------------------------------------------------------------------------------------

SAMPLES = torch.linspace(-1, 1, 2400)
DATA_URI = re.compile(r'src="data:(\w+/\w+);base64,([A-Za-z0-9+/=]+)"')


def media_of(output: OmniRequestOutput) -> list[tuple[str, bytes]]:
    """The embedded files of the HTML, with their types."""
    return [(kind, base64.b64decode(data)) for kind, data in DATA_URI.findall(output._repr_html_())]


def answered(*texts: str, finish_reason: str = "stop", **tensors: torch.Tensor) -> OmniRequestOutput:
    completions = [Completion(index=i, text=text, finish_reason=finish_reason) for i, text in enumerate(texts)]
    output = StageOutput(request_id="<7>", stage_id=0, completions=completions, tensors=tensors)
    times = StageMetrics(stage_id=0, name="llm", arrival=1.0, finished=1.5)
    return OmniRequestOutput("<7>", output, "audio" if tensors else "text", [times], 24_000)


def test_text_is_shown_as_text_in_a_notebook():
    shown = answered("<script>alert(1)</script>\n&amp;")._repr_html_()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\n&amp;amp;" in shown and "request &lt;7&gt;" in shown
    assert set(re.findall(r"</?(\w+)", shown)) == {"div"}
    assert "llm 0.50 s" in shown and "choice" not in shown and "ended by" not in shown


def test_several_choices_are_numbered_in_a_notebook():
    shown = answered("Red.", "Blue.", finish_reason="length")._repr_html_()
    assert re.findall(r"choice \d, ended by: length|Red\.|Blue\.", shown) == [
        "choice 0, ended by: length", "Red.", "choice 1, ended by: length", "Blue.",
    ]  # fmt: skip
    many = answered(*["<b>" * 100_000] * 100)._repr_html_()
    assert "84 further choices" in many and "280,000 further characters" in many and len(many) < 4 << 20


def test_sound_is_played_in_a_notebook():
    spoken = answered("", audio=SAMPLES * 2)
    ((kind, file),) = media_of(spoken)
    assert "pre-wrap" not in spoken._repr_html_()
    assert kind == "audio/wav"
    samples, rate = soundfile.read(io.BytesIO(file), dtype="int16")
    assert rate == 24_000
    assert np.abs(samples / 32767 - (SAMPLES * 2).clamp(-1, 1).numpy()).max() <= 1 / 32767


def test_each_clip_has_a_player_in_a_notebook():
    output = received("audio", [torch.zeros(2, 50)] * 20)
    files = media_of(output)
    assert [soundfile.info(io.BytesIO(file)).channels for _, file in files] == [2] * 16
    assert "4 further clips" in output._repr_html_()


def test_long_sound_is_cut_in_a_notebook():
    shown = answered(audio=torch.zeros(24_000 * 3600))._repr_html_()
    assert "3600.0 s, 24,000 Hz, of which the player has the first 174.8 s" in shown
    assert len(shown) < 12 << 20


@pytest.mark.parametrize("output_format", ["pil", "np", "png", "jpeg", "webp"])
def test_pictures_are_shown_in_a_notebook(output_format):
    files = media_of(received("image", [torch.rand(8, 12, 3)] * 3, output_format))
    expected = output_format if output_format in ("jpeg", "webp") else "png"
    assert [kind for kind, _ in files] == [f"image/{expected}"] * 3
    assert [Image.open(io.BytesIO(file)).size for _, file in files] == [(12, 8)] * 3


def test_large_pictures_are_shown_smaller_in_a_notebook():
    output = received("image", [torch.rand(2048, 4096, 3)], "pil")
    ((_, file),) = media_of(output)
    assert Image.open(io.BytesIO(file)).size == (768, 384)
    assert output.images[0].size == (4096, 2048)


def test_pictures_that_are_too_large_are_named_in_a_notebook():
    shown = received("image", [torch.rand(1024, 1024, 3)] * 4, "png")._repr_html_()
    assert shown.count("<img") == 2 and shown.count("is not shown: too large") == 2
    assert len(shown) < 12 << 20


@pytest.mark.parametrize("output_format", ["pil", "np", "mp4"])
def test_videos_are_played_in_a_notebook(output_format):
    files = media_of(received("video", [torch.rand(4, 8, 12, 3)] * 2, output_format))
    assert [kind for kind, _ in files] == ["video/mp4"] * 2
    with av.open(io.BytesIO(files[1][1])) as container:
        assert [frame.width for frame in container.decode(video=0)] == [12] * 4


def test_a_video_has_its_sound_in_a_notebook():
    params = DiffusionSamplingParams(output_format="np")
    tensors, data = encode_outputs("video", [FILM], params, 44_100, [torch.zeros(2, 11_025)])
    output = OmniRequestOutput("r", StageOutput(request_id="r", stage_id=0, tensors=tensors, data=data), "video", [])
    ((_, file),) = media_of(output)
    with av.open(io.BytesIO(file)) as container:
        assert container.streams.audio[0].rate == 44_100


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (lambda: answered("A.", hidden=torch.zeros(3, 5)), "hidden: Tensor float32 [3, 5]"),
        (lambda: received("image", [PICTURE], "latent"), "latents: Tensor float32 [1, 8, 12, 3]"),
        (lambda: answered(audio=torch.zeros(0)), "sound of shape (0,), 24000 Hz: no player"),
        (lambda: OmniRequestOutput.failed(RequestError("<no>", request_id="r")), "RequestError: &lt;no&gt;"),
    ],
)
def test_what_has_no_player_is_a_line_in_a_notebook(output, line):
    assert line in output()._repr_html_() and not media_of(output())
