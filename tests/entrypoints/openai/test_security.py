# SPDX-License-Identifier: Apache-2.0
"""Media from private addresses, without limits or broken, and requests without the key are refused."""

import argparse
import asyncio
import base64
import contextlib
import functools
import hashlib
import http.server
import inspect
import io
import struct
import threading
import zlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from fastapi import WebSocket
from PIL import Image
from starlette.testclient import TestClient, WebSocketDenialResponse
from vllm import envs
from vllm.connections import HTTPConnection
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from tests.entrypoints.openai.small_apps import make_app, send
from vllm_omni.entrypoints.openai import media_input
from vllm_omni.entrypoints.openai.audio_formats import AUDIO_FORMATS, encode_audio
from vllm_omni.entrypoints.openai.media_input import GuardedMediaIO, is_public
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.media import encode_mp4
from vllm_omni.testing.media import make_audio, make_image, make_video

Fetch = Callable[..., Any]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def wav(seconds: float = 0.2) -> bytes:
    return encode_audio(make_audio(0, seconds).astype(np.float32), "wav", 16000)


@functools.cache
def mp4() -> bytes:
    return encode_mp4(torch.from_numpy(make_video(0, frames=4)), 4.0)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """Fetches one media part, as a server with these flags does."""
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", media_input.CONNECTOR_NAME)
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")

    def get(
        kind: str,
        *urls: str,
        domains: list[str] | None = None,
        folder: Path | str = "",
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
        **limits: Any,
    ) -> Any:
        media_input.install(argparse.Namespace(allowed_media_domains=domains, **limits))

        async def main() -> Any:
            RequestContext.start()
            connector = MEDIA_CONNECTOR_REGISTRY.load(
                envs.VLLM_MEDIA_CONNECTOR, allowed_local_media_path=str(folder), allowed_media_domains=domains
            )
            other = None if beside is None else asyncio.create_task(beside())
            try:
                return [await getattr(connector, f"fetch_{kind}_async")(url) for url in urls]
            finally:
                if other is not None:
                    await other
                await connector.connection.close()

        return asyncio.run(main())

    return get


class Host(http.server.BaseHTTPRequestHandler):
    """A host in the server's private network."""

    def do_GET(self) -> None:
        self.server.visits.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        status, body = {"/image.png": (200, png(make_image())), "/endless": (200, b"x" * 5_000_000)}.get(
            self.path, (404, b"")
        )
        self.send_response(status)
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:
            self.server.visits.append("left")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        server.visits = []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    "name",
    ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "0177.0.0.1", "127.1", "0.0.0.0", "[::ffff:127.0.0.1]", "0"],
)
def test_the_server_does_not_fetch_from_itself(host: http.server.HTTPServer, fetch: Fetch, name: str) -> None:
    host.visits.clear()
    with pytest.raises(VLLMClientError, match=r"not a public address|Invalid URL|cannot be fetched"):
        fetch("image", f"http://{name}:{host.server_port}/image.png")
    assert host.visits == []


@pytest.mark.parametrize("address", ["169.254.169.254", "[fe80::1]", "10.0.0.1", "[fd00::1]", "[::1]", "224.0.0.1"])
def test_private_addresses_are_refused(fetch: Fetch, address: str) -> None:
    with pytest.raises(VLLMValidationError, match="not a public address"):
        fetch("image", f"http://{address}/latest/meta-data")


def test_encoded_private_addresses_are_recognized() -> None:
    public = ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::")
    internal = (
        "100.64.0.1", "198.18.0.1", "240.0.0.1", "255.255.255.255", "::ffff:10.0.0.1", "::7f00:1", "64:ff9b::7f00:1",
        "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe", "fec0::1", "ff02::1", "::", "fe80::1%eth0",
    )  # fmt: skip
    assert [address for address in public if not is_public(address)] == []
    assert [address for address in internal if is_public(address)] == []


def test_an_allowed_host_may_have_a_private_address(host: http.server.HTTPServer, fetch: Fetch) -> None:
    (image,) = fetch("image", f"http://localhost:{host.server_port}/image.png", domains=["localhost"])
    assert image.media.size == make_image().size


def test_a_redirect_to_a_private_address_is_refused(host: http.server.HTTPServer, fetch: Fetch) -> None:
    host.visits.clear()
    target = f"http://127.0.0.1:{host.server_port}/image.png"
    with pytest.raises(VLLMClientError, match="not in --allowed-media-domains"):
        fetch("image", f"http://localhost:{host.server_port}/to/{target}", domains=["localhost"])
    assert host.visits == [f"/to/{target}"]
    url = f"http://localhost:{host.server_port}/to/file:///etc/passwd"
    with pytest.raises(VLLMClientError):
        fetch("image", url, domains=["localhost"])


def test_a_download_is_read_only_up_to_the_limit(host: http.server.HTTPServer, fetch: Fetch) -> None:
    with pytest.raises(VLLMClientError, match="exceed"):
        fetch("image", f"http://localhost:{host.server_port}/endless", domains=["localhost"], max_media_bytes=1000)


def test_a_missing_file_is_a_client_error(host: http.server.HTTPServer, fetch: Fetch) -> None:
    with pytest.raises(VLLMUnprocessableEntityError, match=r"media part 1 .* 404"):
        fetch("image", f"http://localhost:{host.server_port}/missing", domains=["localhost"])
    with pytest.raises(VLLMUnprocessableEntityError, match="cannot be fetched"):
        fetch("image", "http://localhost:1/unreachable", domains=["localhost"])
    with pytest.raises(VLLMClientError):
        fetch("image", "http://no-such-host.invalid/a.png")


@pytest.mark.parametrize(
    "url", ["", "ftp://host/a.png", "gopher://127.0.0.1/", "data:,", "data:image/png,abc", "http://", "x"]
)
def test_other_schemes_than_http_data_and_file_are_a_client_error(fetch: Fetch, url: str) -> None:
    with pytest.raises(VLLMClientError):
        fetch("image", url)


def test_an_error_is_not_its_own_cause(fetch: Fetch) -> None:
    """A cycle would keep its frames, and so the media, until Python's garbage collector runs."""
    with pytest.raises(VLLMValidationError) as raised:
        fetch("image", data_url(b"no image"))
    assert raised.value.__cause__ is not raised.value


def test_local_files_are_read_from_the_allowed_path_only(fetch: Fetch, tmp_path: Path) -> None:
    inside, outside = tmp_path / "open", tmp_path / "secret"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.png").write_bytes(png(make_image()))
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "fine.png").symlink_to(inside / "a.png")
    assert fetch("image", f"file://{inside}/a.png", f"file://{inside}/fine.png", folder=inside)
    for path in (
        f"{outside}/a.png",
        f"{inside}/link.png",
        f"{inside}/../secret/a.png",
        f"{inside}/%2e%2e/secret/a.png",
    ):
        with pytest.raises(VLLMClientError, match="allowed-local-media-path"):
            fetch("image", f"file://{path}", folder=inside)
    for path in (f"{inside}/missing.png", f"{inside}/"):
        with pytest.raises(VLLMClientError):
            fetch("image", f"file://{path}", folder=inside)
    with pytest.raises(VLLMValidationError, match="allowed-local-media-path"):
        fetch("image", f"file://{inside}/a.png")


def test_valid_media_is_read(fetch: Fetch) -> None:
    (image,) = fetch("image", data_url(png(make_image())))
    assert image.media.size == make_image().size
    (video,) = fetch("video", data_url(mp4(), "video/mp4"))
    assert video.media[0].shape[0] == 4
    frames = ",".join(base64.b64encode(png(make_image(seed))).decode() for seed in range(2))
    (video,) = fetch("video", f"data:video/jpeg;base64,{frames}")
    assert video.media[0].shape[0] == 2


@pytest.mark.parametrize("audio_format", sorted(set(AUDIO_FORMATS) - {"pcm", "pcm16"}))
def test_audio_of_every_format_is_read(fetch: Fetch, audio_format: str) -> None:
    file = encode_audio(make_audio(0, 0.5).astype(np.float32), audio_format, 16000)
    ((samples, _),) = fetch("audio", data_url(file, "audio/x"))
    assert len(samples) > 1000


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
BROKEN = {
    "nothing": b"",
    "text": b"hello",
    "playlist": PLAYLIST,
    "tagged playlist": b"ID3\x04\x00\x00\x00\x00\x00\x00" + PLAYLIST,
    "list of files": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "subtitles": b"1\n00:00:01,000 --> 00:00:02,000\nhello\n",
    "page": b"<?xml version='1.0'?><MPD></MPD>",
    "half of a WAV": b"RIFF\x00\x00",
    "WAV of nothing": b"RIFF\x24\x00\x00\x00WAVEfmt ",
    "Matroska of nothing": b"\x1a\x45\xdf\xa3" + b"\0" * 40,
    "MP4 of nothing": b"\x00\x00\x00\x18ftypisom" + b"\0" * 40,
    "noise": np.random.default_rng(0).bytes(2000),
}


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_media_is_a_client_error_with_its_name(fetch: Fetch, kind: str, name: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"media part 1 of the request, {kind}") as error:
        fetch(kind, data_url(BROKEN[name]))
    assert error.value.parameter == f"{kind}_url"


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_truncated_media_is_a_client_error(fetch: Fetch, kind: str) -> None:
    whole = {"image": png(make_image()), "audio": wav(), "video": mp4()}[kind]
    for length in range(1, len(whole), len(whole) // 7):
        with contextlib.suppress(VLLMClientError):
            fetch(kind, data_url(whole[:length]))


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_the_server_answers_while_media_is_decoded(fetch: Fetch, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    others_were_answered = threading.Event()
    started = threading.Event()
    load = GuardedMediaIO.load_bytes

    def slow_load(self: GuardedMediaIO, data: bytes) -> Any:
        started.set()
        assert others_were_answered.wait(30), "other requests had to wait"
        return load(self, data)

    async def others() -> None:
        while not started.is_set():
            await asyncio.sleep(0.001)
        others_were_answered.set()

    monkeypatch.setattr(GuardedMediaIO, "load_bytes", slow_load)
    assert fetch(kind, data_url({"image": png(make_image()), "audio": wav(), "video": mp4()}[kind]), beside=others)


@pytest.mark.parametrize("data", ["###", "a", "AAAA=AAAA", "ä", "AAA\n"])
def test_invalid_base64_is_a_client_error(fetch: Fetch, data: str) -> None:
    for kind in ("image", "audio", "video"):
        with pytest.raises(VLLMValidationError):
            fetch(kind, f"data:x/y;base64,{data}")


def huge_png(width: int, height: int) -> bytes:
    """An image of a few bytes that is enormous when decoded."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def test_a_too_large_image_is_not_decoded(fetch: Fetch) -> None:
    for width, height in ((100_000, 1000), (2**31 - 1, 2**31 - 1)):
        with pytest.raises(VLLMValidationError, match=r"--max-image-pixels|decompression bomb"):
            fetch("image", data_url(huge_png(width, height)))
    with pytest.raises(VLLMValidationError, match="--max-image-pixels"):
        fetch("image", data_url(png(make_image())), max_image_pixels=160 * 128 - 1)
    assert fetch("image", data_url(png(make_image())), max_image_pixels=160 * 128)
    with pytest.raises(VLLMValidationError, match="--max-image-pixels"):
        fetch("video", f"data:video/jpeg;base64,{base64.b64encode(huge_png(100_000, 1000)).decode()}")


def test_videos_are_limited(fetch: Fetch) -> None:
    with pytest.raises(VLLMValidationError, match="--max-video-pixels"):
        fetch("video", data_url(mp4()), max_video_pixels=96 * 64 - 1)
    with pytest.raises(VLLMValidationError, match="--max-video-seconds"):
        fetch("video", data_url(mp4()), max_video_seconds=0.9)
    assert fetch("video", data_url(mp4()), max_video_pixels=96 * 64, max_video_seconds=1.1)


def test_a_video_without_decodable_frames_is_refused(fetch: Fetch) -> None:
    start = mp4().index(b"mdat") + 4
    size = struct.unpack_from(">I", mp4(), start - 8)[0] - 8
    with pytest.raises(VLLMValidationError, match="none of its frames can be decoded"):
        fetch("video", data_url(mp4()[:start] + bytes(size) + mp4()[start + size :]))


def test_audio_is_limited(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_AUDIO_DECODE_DURATION_S", "1")
    assert fetch("audio", data_url(wav(0.5)))
    with pytest.raises(VLLMValidationError, match="VLLM_MAX_AUDIO_DECODE_DURATION_S"):
        fetch("audio", data_url(wav(1.5)))


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_the_bytes_of_every_media_part_are_limited(fetch: Fetch, kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 2000)
    for url in (data_url(b"x" * 2000), f"file://{tmp_path}/file"):
        with pytest.raises(VLLMValidationError, match="--max-media-bytes"):
            fetch(kind, url, folder=tmp_path, max_media_bytes=1000)


def test_the_media_parts_of_a_request_are_limited(fetch: Fetch) -> None:
    url = data_url(png(make_image()))
    assert len(fetch("image", url, url, max_media_parts=2)) == 2
    with pytest.raises(VLLMValidationError, match="--max-media-parts"):
        fetch("image", url, url, url, max_media_parts=2)


def test_another_media_connector_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "mine")
    media_input.install(argparse.Namespace(allowed_media_domains=None))
    assert envs.VLLM_MEDIA_CONNECTOR == "mine"


KEY = {"authorization": "Bearer secret"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/echo", "/tokenize", "/metrics", "/docs/x", "/static/x", "/secret", "/nowhere", "http://server//health",
        "/health/",
    ],
)  # fmt: skip
def test_every_path_but_health_requires_the_key(path: str) -> None:
    app = make_app(api_key=["other", "secret"])
    for headers in (
        {},
        {"authorization": "secret"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic secret"},
        {"x-api-key": "wrong"},
        {"authorization": "Bearer wrong", "x-api-key": "secret"},
    ):
        response = send(app, "GET", path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == 401
    for headers in (KEY, {"x-api-key": "secret"}):
        assert send(app, "GET", path, headers=headers).status_code != 401


def test_health_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(api_key=["secret"])
    app.add_api_route("/readyz", lambda: "here", methods=["GET"])
    for method in ("GET", "HEAD"):
        assert [send(app, method, path).status_code for path in ("/health", "/ping", "/readyz")] == [200] * 3


def test_the_front_page_is_open_for_reading() -> None:
    app = make_app(api_key=["secret"])
    app.add_api_route("/", lambda: "here", methods=["GET", "POST"])
    assert [send(app, method, "/").status_code for method in ("GET", "HEAD", "POST")] == [200, 200, 401]
    assert send(app, "GET", "/", headers={"authorization": "Bearer wrong"}).status_code == 401


LISTS = ("/v1/models", "/v1/audio/models", "/v1/audio/voices")


def test_public_lists_and_only_these_need_no_key() -> None:
    strict, app = make_app(api_key=["secret"]), make_app(api_key=["secret"], public_lists=True)
    for path in LISTS:
        app.add_api_route(path, lambda: "here", methods=["GET", "POST", "DELETE"])
        for method in ("GET", "HEAD"):
            assert send(strict, method, path).status_code == 401
            assert send(app, method, path).status_code == 200
            assert send(app, method, path, headers={"authorization": "Bearer "}).status_code == 200
            assert send(app, method, path, headers={"authorization": "Bearer wrong"}).status_code == 401
            assert send(app, method, path, headers=KEY).status_code == 200
        for method in ("POST", "DELETE", "PUT"):
            assert send(app, method, path).status_code == 401
        for other in (f"{path}/", f"{path}/x", f"http://server/{path}", path.upper()):
            assert send(app, "GET", other).status_code == 401
    for path in ("/v1/echo", "/metrics", "/secret", "/v1/audio/speech", "/v1/pipeline"):
        assert send(app, "GET", path).status_code == 401


def test_without_the_key_the_body_is_not_read() -> None:
    async def never():
        raise AssertionError("the body was read")
        yield b""

    response = send(make_app(api_key=["secret"]), "POST", "/v1/echo", content=never())
    assert response.status_code == 401


def test_the_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    app = make_app()
    assert send(app, "GET", "/secret").status_code == 401
    assert send(app, "GET", "/secret", headers=KEY).status_code == 200


def test_every_websocket_takes_the_key_as_a_subprotocol() -> None:
    """Of all endpoints there are now and later: the check is outside of them."""
    app = make_app(api_key=["secret"])

    @app.websocket("/v1/anything")
    async def endpoint(websocket: WebSocket) -> None:
        await websocket.accept("realtime")
        await websocket.send_text(RequestContext.current().owner.hex())

    client = TestClient(app)
    owner = hashlib.sha256(b"secret").hexdigest()
    for protocols in (["realtime", "openai-insecure-api-key.secret"], ["openai-insecure-api-key.secret", "realtime"]):
        with client.websocket_connect("/v1/anything", subprotocols=protocols) as socket:
            assert socket.accepted_subprotocol == "realtime" and socket.receive_text() == owner
    for protocols in ([], ["realtime"], ["openai-insecure-api-key.wrong"], ["secret"]):
        with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect("/v1/anything", protocols):
            pass
        assert refused.value.status_code == 401


def test_signatures_of_overridden_methods() -> None:
    """Another version of vLLM or aiohttp fails here, not by skipping a check."""
    assert [*inspect.signature(MediaConnector.load_from_url).parameters] == ["self", "url", "media_io", "fetch_timeout"]
    assert [*inspect.signature(MediaConnector.load_from_url_async).parameters] == [
        "self", "url", "media_io", "fetch_timeout",
    ]  # fmt: skip
    assert [*inspect.signature(HTTPConnection.get_async_client).parameters] == ["self"]
    assert [*inspect.signature(aiohttp.TCPConnector.connect).parameters] == ["self", "req", "traces", "timeout"]
    assert [*inspect.signature(AuthenticationMiddleware.verify_token).parameters] == ["self", "headers"]
