# SPDX-License-Identifier: Apache-2.0
"""The memory of decoded media: of a request and of all. Needs no model."""

import base64
import gc
import io
import logging
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.video import VideoLoader

from tests.entrypoints.openai.test_security import huge_png
from vllm_omni.entrypoints.openai import request_context
from vllm_omni.entrypoints.openai.media_budget import MediaBudget, MediaShare
from vllm_omni.entrypoints.openai.media_input import AddressGuard, GuardedHTTPConnection, OmniMediaConnector
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.server_args import RequestLimits
from vllm_omni.errors import PipelineFullError
from vllm_omni.media import encode_mp4
from vllm_omni.testing.media import make_video

IMAGE_BYTES = 40 * 30 * 4
FRAMES_BYTES = 4 * 96 * 64 * 3
SOUND_BYTES = 8000 * 4


def png(size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return file.getvalue()


def mp4() -> bytes:
    return encode_mp4(torch.from_numpy(make_video(0, frames=4)), 4.0)


def flac(num_channels: int = 1) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros((8000, num_channels)), 8000, "PCM_16", format="FLAC")
    return file.getvalue()


PARTS: dict[str, Callable[[Any], Any]] = {
    "image": lambda image: image.media,
    "video": lambda video: video.media[0][1:],
    "audio": lambda sound: sound[0][5:],
}
FILES = {"image": (png, IMAGE_BYTES), "video": (mp4, FRAMES_BYTES), "audio": (flac, SOUND_BYTES)}


class Requests:
    """Each `read` is by a request of its own, unless it names one."""

    def __init__(self, max_request_bytes: int, max_total_bytes: int, max_client_bytes: int | None) -> None:
        self.budget = MediaBudget(max_request_bytes, max_total_bytes, max_client_bytes)
        self._connector = OmniMediaConnector(
            connection=GuardedHTTPConnection(AddressGuard()), limits=RequestLimits(), budget=self.budget
        )

    def read(self, kind: str, data: bytes, request: RequestContext | None = None, media_type: str = "x/y") -> Any:
        request_context._current.set(request or RequestContext())
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        return getattr(self._connector, f"fetch_{kind}")(url)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Requests]]:
    # pytest keeps what is logged: vLLM's error of a missing package, with the frames that hold a sound.
    monkeypatch.setattr(logging.getLogger("vllm.multimodal.media.audio"), "disabled", True)
    token = request_context._current.set(RequestContext())
    yield lambda of_one=1 << 30, of_all=1 << 30, of_client=None: Requests(of_one, of_all, of_client)
    request_context._current.reset(token)


@pytest.mark.parametrize("kind", FILES)
def test_media_of_a_request_are_counted_together(requests: Callable[..., Requests], kind: str) -> None:
    make, size = FILES[kind]
    server = requests(of_one=2 * size)
    request = RequestContext()
    server.read(kind, make(), request)
    server.read(kind, make(), request)
    with pytest.raises(VLLMValidationError, match="--max-decoded-bytes"):
        server.read("image", png((1, 1)), request)
    assert server.read(kind, make()), "another request has its own"


def test_media_are_not_decoded_beyond_the_limit(
    requests: Callable[..., Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = huge_png(8000, 4000)
    with pytest.raises(VLLMValidationError, match="cannot be read"):
        requests().read("image", broken)
    with pytest.raises(VLLMValidationError, match="--max-decoded-bytes"):
        requests(of_one=8000 * 4000).read("image", broken)
    monkeypatch.delattr(VideoLoader, "read_frames")
    with pytest.raises(VLLMValidationError, match="--max-decoded-bytes"):
        requests(of_one=FRAMES_BYTES - 1).read("video", mp4())
    monkeypatch.delattr(soundfile.SoundFile, "read")
    with pytest.raises(VLLMValidationError, match="--max-decoded-bytes"):
        requests(of_one=8 * SOUND_BYTES - 1).read("audio", flac(num_channels=8))


@pytest.mark.parametrize("kind", FILES)
def test_media_of_all_requests_are_counted_until_they_are_freed(requests: Callable[..., Requests], kind: str) -> None:
    make, size = FILES[kind]
    server = requests(of_all=size + 100)
    held = server.read(kind, make())
    with pytest.raises(PipelineFullError, match="--max-total-decoded-bytes") as refused:
        server.read(kind, make())
    assert refused.value.retry_after_s > 0
    del held
    part = PARTS[kind](server.read(kind, make()))
    assert server.budget.taken_bytes > 0, "a view holds the memory"
    del part
    assert server.budget.taken_bytes == 0


@pytest.mark.parametrize("of_client", [None, 2 * IMAGE_BYTES])
def test_a_client_has_half_of_what_all_have(requests: Callable[..., Requests], of_client: int | None) -> None:
    """Its key; or its address, where there are no keys."""
    server = requests(of_one=IMAGE_BYTES, of_all=4 * IMAGE_BYTES, of_client=of_client)
    greedy = [RequestContext(owner=b"a", address=address) for address in ("1.1.1.1", "2.2.2.2")]
    held = [server.read("image", png(), request) for request in greedy]
    for request in (RequestContext(owner=b"a"), RequestContext(owner=b"a")):
        with pytest.raises(PipelineFullError, match="--max-client-decoded-bytes"):
            server.read("image", png(), request)
    held += [server.read("image", png(), RequestContext(address="1.1.1.1")) for _ in range(2)]
    held.pop(0)
    with pytest.raises(PipelineFullError, match="--max-client-decoded-bytes"):
        server.read("image", png(), RequestContext(address="1.1.1.1"))
    held.append(server.read("image", png(), RequestContext(owner=b"a")))
    with pytest.raises(PipelineFullError, match="--max-total-decoded-bytes"):
        server.read("image", png(), RequestContext(owner=b"b"))
    held.clear()
    assert server.budget.taken_bytes == 0


def test_a_list_of_frames_is_counted_as_one_array(requests: Callable[..., Requests]) -> None:
    server = requests()
    frames = b",".join([base64.b64encode(png())] * 3).decode()
    request_context._current.set(RequestContext())
    video: Any = server._connector.fetch_video(f"data:video/jpeg;base64,{frames}")
    assert server.budget.taken_bytes == video.media[0].nbytes == 3 * 40 * 30 * 3
    del video
    assert server.budget.taken_bytes == 0


@pytest.mark.parametrize("kind", FILES)
def test_broken_media_give_back_what_they_took(requests: Callable[..., Requests], kind: str) -> None:
    server = requests()
    whole = FILES[kind][0]()
    for length in range(20, len(whole), max(1, len(whole) // 9)):
        try:
            server.read(kind, whole[:length])
        except VLLMValidationError:
            assert server.budget.taken_bytes == 0
    gc.collect()
    assert server.budget.taken_bytes == 0


def test_media_in_a_cycle_make_room(requests: Callable[..., Requests]) -> None:
    server = requests(of_all=IMAGE_BYTES)
    gc.disable()
    try:
        cycle: list[Any] = [server.read("image", png())]
        cycle.append(cycle)
        del cycle
        assert server.read("image", png())
    finally:
        gc.enable()


def test_what_a_part_takes_can_change() -> None:
    budget = MediaBudget(10, 12)
    share, other = MediaShare(budget, RequestContext()), MediaShare(budget, RequestContext())
    share.take(10)
    share.take(3)
    other.take(9)
    with pytest.raises(PipelineFullError):
        share.take(4)
    assert budget.taken_bytes == 12
    other.release()
    share.take(10)
    share.release()
    assert budget.taken_bytes == 0


def test_an_image_inside_of_another_format_is_refused(requests: Callable[..., Requests]) -> None:
    """An icon's header says 1x1 of a picture of any size, which Pillow decodes when it is opened."""
    inner = png((500, 400))
    icon = struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 1, 1, 0, 0, 1, 32, len(inner), 22) + inner
    with pytest.raises(VLLMValidationError, match="none of the known formats"):
        requests().read("image", icon)
