# SPDX-License-Identifier: Apache-2.0
"""Images answered as URLs, with OpenAI's client, and the store of their files."""

import asyncio
import base64
import io
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from PIL import Image
from vllm.exceptions import VLLMNotFoundError

from tests.clock import pass_time
from tests.entrypoints.fake_pipelines import STAGES, running
from tests.entrypoints.openai.fake_server import FakeServer
from tests.entrypoints.openai.media_apps import png, send, use, with_flags
from vllm_omni import AsyncOmniLLM
from vllm_omni.entrypoints.openai.file_store import FILES_PATH, FileStore
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError
from vllm_omni.entrypoints.openai.server_args import ServerLimits
from vllm_omni.entrypoints.openai.video_store import VideoStore

GROUP = "llm"
REQUEST: dict[str, Any] = {
    "prompt": "a hen",
    "size": "32x32",
    "response_format": "url",
    "extra_body": {"num_inference_steps": 2, "seed": 1},
}


def url_of(answer: Any, index: int = 0) -> str:
    assert answer.data[index].b64_json is None
    return answer.data[index].url


async def generate(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.images.generate(**{**REQUEST, **fields})


async def fetch(client: openai.AsyncOpenAI, url: str, method: str = "GET", **request: Any) -> httpx2.Response:
    """Without the headers of OpenAI's client: no key."""
    return await client._client.request(method, url, **request)


def test_a_url_has_the_image_of_base64(image_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        answer = await generate(client, n=2)
        assert answer.size == "32x32" and len({url_of(answer, index) for index in (0, 1)}) == 2
        inline = await generate(client, n=2, response_format="b64_json")
        for index, image in enumerate(inline.data):
            url = url_of(answer, index)
            assert url.startswith(f"http://server{FILES_PATH}/") and url.endswith(".png")
            file = await fetch(client, url)
            assert file.status_code == 200 and file.content == base64.b64decode(image.b64_json)
            assert file.headers["content-type"] == "image/png" and file.headers["cache-control"] == "private"
            head = await fetch(client, url, "HEAD")
            assert head.status_code == 200 and head.content == b""
            assert head.headers["content-length"] == str(len(file.content))
            part = await fetch(client, url, headers={"Range": "bytes=0-3"})
            assert (part.status_code, part.content) == (206, file.content[:4])

    use(image_app, main)


def test_the_names_dall_e_are_answered_with_urls_by_default(image_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        for name in ("dall-e-2", "dall-e-3"):
            answer = await generate(client, model=name, response_format=openai.omit)
            assert (await fetch(client, url_of(answer))).status_code == 200
        for fields in ({"model": "gpt-image-1"}, {"model": "dall-e-3", "response_format": "b64_json"}):
            answer = await generate(client, **{"response_format": openai.omit, **fields})
            assert answer.data[0].b64_json and answer.data[0].url is None

    use(image_app, main)


def test_an_edit_is_answered_as_a_url_too(image_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        fields: Any = {**REQUEST, "image": ("a.png", png()), "output_format": "webp"}
        url = url_of(await client.images.edit(**fields))
        file = await fetch(client, url)
        assert file.headers["content-type"] == "image/webp" and url.endswith(".webp")
        assert Image.open(io.BytesIO(file.content)).format == "WEBP"

    use(image_app, main)


def test_streamed_images_are_base64(image_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        (event,) = [event async for event in await generate(client, stream=True)]
        assert event.type == "image_generation.completed" and base64.b64decode(event.b64_json)

    use(image_app, main)


def test_the_url_is_under_the_address_of_the_request(image_app: FastAPI) -> None:
    def origin(headers: dict[str, str]) -> str:
        body = {**REQUEST, **REQUEST["extra_body"]}
        body.pop("extra_body")
        answer = send(image_app, "POST", "/v1/images/generations", json=body, headers=headers)
        return answer.json()["data"][0]["url"].partition("/v1")[0]

    assert origin({"Host": "images.example:8443"}) == "http://images.example:8443"
    # Only the web server's rules for proxies decide what these count for.
    assert origin({"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "https"}) == "http://server"


def test_only_a_file_with_its_name_needs_no_key(image_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        url = url_of(await generate(client.with_options(api_key="one")))
        assert (await fetch(client, url)).status_code == 200
        assert (await fetch(client, url, "HEAD")).status_code == 200
        unknown = f"{FILES_PATH}/{'a' * 32}.png"
        missing = await fetch(client, unknown)
        assert missing.status_code == 404 and "expired" in missing.json()["error"]["message"]
        closed = [FILES_PATH, f"{FILES_PATH}/", f"{FILES_PATH}/a.png", f"{unknown}/x", f"/x{unknown}", "/v1/models"]
        closed += [f"{FILES_PATH}/../generations", f"{FILES_PATH}/%2e%2e%2fgenerations", f"{unknown}%0a"]
        for path in closed:
            assert (await fetch(client, path)).status_code == 401, path
        for method in ("POST", "DELETE", "PUT"):
            assert (await fetch(client, url, method)).status_code == 401

    use(with_flags(image_app, "--api-key", "one", "other"), main)


def test_a_model_without_images_has_no_files(tmp_path: Path) -> None:
    with running(AsyncOmniLLM, tmp_path, STAGES[:1]) as llm:
        answer = send(FakeServer(llm).app, "GET", f"{FILES_PATH}/{'a' * 32}.png")
    assert answer.status_code == 404 and "keeps no images" in answer.json()["error"]["message"]


def test_the_size_may_be_auto(image_app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        small: Any = {"num_inference_steps": 2, "seed": 1, "height": 32, "width": 64}
        fields: Any = {"size": "auto", "extra_body": small}
        assert (await generate(client, **fields)).size == "64x32"
        assert (await client.images.edit(**{**REQUEST, **fields, "image": ("a.png", png())})).size == "64x32"

    use(image_app, main)


def test_flags_set_the_limits_of_the_store(image_app: FastAPI, tmp_path: Path) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        urls = [url_of(await generate(client)) for _ in range(2)]
        assert [(await fetch(client, url)).status_code for url in urls] == [404, 200]
        (file,) = tmp_path.glob("*/*")
        assert urls[1].endswith(f"/{file.name}")
        with pytest.raises(openai.APIStatusError, match="--max-stored-images") as refused:
            await generate(client, n=2)
        assert refused.value.status_code == 507

    app = with_flags(image_app, "--video-dir", str(tmp_path), "--max-stored-images", "1")
    use(app, main)


def test_the_files_go_with_the_server(image_app: FastAPI, tmp_path: Path) -> None:
    app = with_flags(image_app, "--video-dir", str(tmp_path))

    async def main(client: openai.AsyncOpenAI) -> None:
        async with app.router.lifespan_context(app):
            await generate(client)
            assert list(tmp_path.glob("*/*"))
        assert not list(tmp_path.iterdir())

    use(app, main)


def test_the_store_is_limited_in_number_bytes_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        limits = ServerLimits(
            video_dir=str(tmp_path), max_stored_images=3, max_stored_image_bytes=10, image_expires_after_s=60
        )
        store = FileStore(limits)

        async def add(owner: bytes, *contents: bytes) -> list[str]:
            return await store.add(contents, "png", owner)

        def kept() -> set[str]:
            return {file.name for file in tmp_path.glob("*/*")}

        (others,) = await add(b"other", b"12345678")
        first = await add(b"one", b"1", b"2")
        second = await add(b"one", b"3", b"4")
        assert kept() == {others, first[1], *second}  # number
        third = await add(b"one", b"123456789")
        assert kept() == {others, second[1], *third}  # bytes
        assert store.path(third[0]).read_bytes() == b"123456789"
        for contents in ([b"1"] * 4, [b"12345", b"123456"]):
            with pytest.raises(OmniHTTPError, match="b64_json"):
                await add(b"one", *contents)
        assert kept() == {others, second[1], *third}
        await pass_time(60, monkeypatch)  # time
        with pytest.raises(VLLMNotFoundError, match="expired"):
            store.path(others)
        assert not kept()
        await store.close()

    asyncio.run(main())


def test_the_bytes_of_all_keys_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        store = FileStore(ServerLimits(video_dir=str(tmp_path), max_total_stored_image_bytes=10))

        async def add(owner: bytes, *contents: bytes) -> list[str]:
            return await store.add(contents, "png", owner)

        (others,) = await add(b"other", b"123456")
        (first,) = await add(b"one", b"1234")
        with pytest.raises(OmniHTTPError, match="--max-total-stored-image-bytes") as refused:
            await add(b"one", b"123", b"45")
        assert refused.value.http_status == HTTPStatus.INSUFFICIENT_STORAGE
        assert {file.name for file in tmp_path.glob("*/*")} == {others, first}, "what was refused removes nothing"
        second = await add(b"one", b"12", b"34")
        assert {file.name for file in tmp_path.glob("*/*")} == {others, *second} and first not in second
        await store.close()

    asyncio.run(main())


def test_a_cancelled_request_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled once, or twice, while its files are written."""
    may_write, write = threading.Event(), Path.write_bytes
    written: list[int] = []

    def write_late(path: Path, content: bytes) -> None:
        may_write.wait(60)
        written.append(write(path, content))

    monkeypatch.setattr(Path, "write_bytes", write_late)

    async def main() -> None:
        store = FileStore(ServerLimits(video_dir=str(tmp_path)))
        adding = asyncio.create_task(store.add([b"1"] * 100, "png", b""))
        for _ in range(2):
            await asyncio.sleep(0)
            adding.cancel()
        await asyncio.sleep(0)
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await adding
        while len(written) < 100:
            await asyncio.sleep(0.01)  # There is no event for it.
        assert not list(tmp_path.glob("*/*"))
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("make_store", [FileStore, VideoStore])
def test_the_files_of_a_killed_server_are_removed_by_the_next(
    make_store: Callable[[ServerLimits], FileStore | VideoStore], tmp_path: Path
) -> None:
    limits = ServerLimits(video_dir=str(tmp_path))
    running = make_store(limits)
    (folder,) = tmp_path.iterdir()
    killed = folder.with_name(f"{folder.name}-killed")  # Nobody holds it.
    killed.mkdir()
    (killed / "file.png").touch()
    of_another_host = folder.with_name(folder.name.replace(socket.gethostname(), "another"))
    of_another_host.mkdir()
    next_one = make_store(limits)
    assert folder.exists() and of_another_host.exists() and not killed.exists()
    for store in (running, next_one):
        asyncio.run(store.close())
    assert list(tmp_path.iterdir()) == [of_another_host]
