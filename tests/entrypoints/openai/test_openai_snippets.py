# SPDX-License-Identifier: Apache-2.0
"""OpenAI's documented programs for images and videos; only the server and the model are replaced."""

import base64
import io
import time
from pathlib import Path
from typing import Any

import av
import openai
import pytest
from openai.types import (
    ImageEditCompletedEvent,
    ImageEditPartialImageEvent,
    ImageGenCompletedEvent,
    ImageGenPartialImageEvent,
    ImagesResponse,
    Video,
)
from PIL import Image
from pydantic import BaseModel

from tests.entrypoints.openai.media_apps import png
from tests.servers import RunningServer

GROUP = "server"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check_fields(answer: Any, expected: type[BaseModel]) -> None:
    """Validates an answer, which OpenAI's client does not, for the required fields."""
    assert isinstance(answer, expected)
    for name, field in expected.model_fields.items():
        value = getattr(answer, name)
        assert value is not None or not field.is_required(), name
        if isinstance(value, BaseModel):
            check_fields(value, type(value))


class TestImages:
    @pytest.fixture
    def client(self, image_server: RunningServer) -> openai.OpenAI:
        return image_server.openai()

    @pytest.fixture
    def model(self, image_server: RunningServer) -> str:
        return image_server.model

    def test_generate(self, client: openai.OpenAI, model: str) -> None:
        prompt = """
        A children's book drawing of a veterinarian using a stethoscope to
        listen to the heartbeat of a baby otter.
        """

        result = client.images.generate(
            model=model,
            prompt=prompt,
        )

        image_base64 = result.data[0].b64_json
        image_bytes = base64.b64decode(image_base64)

        # Save the image to a file
        with open("otter.png", "wb") as f:
            f.write(image_bytes)

        check_fields(result, ImagesResponse)
        assert Image.open("otter.png").size == (1024, 1024)

    def test_options(self, client: openai.OpenAI, model: str) -> None:
        img = client.images.generate(
            model=model,
            prompt="A cute baby sea otter",
            n=1,
            size="1024x1024",
            quality="high",
            background="opaque",
            moderation="low",
            output_format="jpeg",
            output_compression=50,
            user="user-1234",
        )

        image_bytes = base64.b64decode(img.data[0].b64_json)
        with open("output.jpeg", "wb") as f:
            f.write(image_bytes)

        check_fields(img, ImagesResponse)
        assert (img.output_format, img.size, img.background) == ("jpeg", "1024x1024", "opaque")
        assert Image.open("output.jpeg").format == "JPEG"

    def test_stream(self, client: openai.OpenAI, model: str) -> None:
        stream = client.images.generate(
            prompt="Draw a gorgeous image of a river made of white owl feathers",
            model=model,
            stream=True,
            partial_images=2,
        )

        for event in stream:
            if event.type == "image_generation.partial_image":
                idx = event.partial_image_index
                image_base64 = event.b64_json
                image_bytes = base64.b64decode(image_base64)
                with open(f"river{idx}.png", "wb") as f:
                    f.write(image_bytes)
                check_fields(event, ImageGenPartialImageEvent)

        assert event.type == "image_generation.completed"
        check_fields(event, ImageGenCompletedEvent)
        assert [Image.open(f"river{i}.png").format for i in range(2)] == ["PNG", "PNG"]

    def test_edit(self, client: openai.OpenAI, model: str) -> None:
        Path("body-lotion.png").write_bytes(png())
        prompt = """
        Generate a photorealistic image of a gift basket on a white background.
        """

        result = client.images.edit(
            model=model,
            image=[
                open("body-lotion.png", "rb"),  # noqa: SIM115 (as the documentation has it)
            ],
            prompt=prompt,
        )

        image_base64 = result.data[0].b64_json
        image_bytes = base64.b64decode(image_base64)
        with open("gift-basket.png", "wb") as f:
            f.write(image_bytes)

        check_fields(result, ImagesResponse)
        assert Image.open("gift-basket.png").format == "PNG"

    def test_edit_with_options_as_a_stream(self, client: openai.OpenAI, model: str) -> None:
        Path("sunlit_lounge.png").write_bytes(png())

        stream = client.images.edit(
            model=model,
            image=open("sunlit_lounge.png", "rb"),  # noqa: SIM115
            prompt="A sunlit indoor lounge area with a pool",
            input_fidelity="high",
            stream=True,
            partial_images=1,
        )

        *partial, completed = list(stream)
        for event in partial:
            check_fields(event, ImageEditPartialImageEvent)
        check_fields(completed, ImageEditCompletedEvent)
        assert Image.open(io.BytesIO(base64.b64decode(completed.b64_json))).format == "PNG"


class TestVideos:
    @pytest.fixture
    def client(self, video_server: RunningServer) -> openai.OpenAI:
        return video_server.openai()

    @pytest.fixture
    def model(self, video_server: RunningServer) -> str:
        return video_server.model

    def test_create_and_download(self, client: openai.OpenAI, model: str) -> None:
        video = client.videos.create(
            model=model,
            prompt="A video of a cool cat on a motorcycle in the night",
        )
        check_fields(video, Video)

        progress = getattr(video, "progress", 0)
        while video.status in ("in_progress", "queued"):
            # Refresh status
            video = client.videos.retrieve(video.id)
            progress = getattr(video, "progress", 0)
            time.sleep(0.1)

        assert video.status == "completed" and progress == 100
        check_fields(video, Video)
        assert (video.size, video.seconds) == ("32x32", "0.3125")

        content = client.videos.download_content(video.id, variant="video")
        content.write_to_file("video.mp4")

        with av.open("video.mp4") as container:
            assert sum(1 for _ in container.decode(video=0)) == 5
        client.videos.delete(video.id)

    def test_create_and_poll_remix_list_and_delete(self, client: openai.OpenAI, model: str) -> None:
        video = client.videos.create_and_poll(
            model=model,
            prompt="A video of a cat on a motorcycle",
        )
        assert video.status == "completed"

        remixed = client.videos.remix(
            video_id=video.id,
            prompt="Extend the scene with the cat taking a bow to the cheering audience",
        )
        check_fields(remixed, Video)
        assert remixed.remixed_from_video_id == video.id
        remixed = client.videos.poll(remixed.id)
        assert remixed.status == "completed"

        page = client.videos.list()
        assert [video.id for video in page.data] == [remixed.id, video.id]
        for made in page:
            deleted = client.videos.delete(made.id)
            assert deleted.deleted and deleted.id == made.id
        assert client.videos.list().data == []
