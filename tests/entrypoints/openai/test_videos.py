# SPDX-License-Identifier: Apache-2.0
"""The video endpoints, with OpenAI's client, and the store of videos."""

import asyncio
import base64
import functools
import gc
import io
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import pytest
from fastapi import FastAPI, Request
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

from tests.clock import pass_time
from tests.entrypoints.fake_pipelines import is_idle
from tests.entrypoints.openai.media_apps import MODEL, png, send, serving, use, with_flags
from vllm_omni.diffusion.pipeline_info import nearest_num_frames
from vllm_omni.entrypoints.openai import videos
from vllm_omni.entrypoints.openai.server_args import ServerLimits
from vllm_omni.entrypoints.openai.video_store import Video, VideoJob, VideoStore
from vllm_omni.errors import PipelineFullError
from vllm_omni.testing.diffusers_oracle import DiffusersOracle
from vllm_omni.testing.tiny.diffusion_lora import write_tiny_diffusion_lora

SMALL: dict[str, Any] = {"num_inference_steps": 2, "seed": 1}
LONG: dict[str, Any] = {"num_inference_steps": 200, "num_frames": 33}

NO_KEY = b""

URI = "data:image/png;base64," + base64.b64encode(png()).decode()

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")]


@pytest.fixture(scope="module")
def app(tiny_diffusion: Callable[[str], Path]) -> Iterator[FastAPI]:
    with serving(tiny_diffusion("wan"), max_inflight=2, max_queued=1) as app:
        yield app


def frames_of(file: bytes) -> tuple[int, tuple[int, int], float]:
    """The number of frames, their size, and frames per second."""
    with av.open(io.BytesIO(file)) as container:
        stream = container.streams.video[0]
        return sum(1 for _ in container.decode(stream)), (stream.width, stream.height), float(stream.average_rate or 0)


def difference(file: bytes, other: bytes) -> float:
    """The mean difference of the pixels, 0 to 255."""
    frames = []
    for video in (file, other):
        with av.open(io.BytesIO(video)) as container:
            frames.append(np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]))
    return float(np.abs(frames[0].astype(int) - frames[1]).mean())


async def downloaded(client: openai.AsyncOpenAI, video_id: str) -> bytes:
    video = await client.videos.poll(video_id, poll_interval_ms=20)
    assert video.status == "completed", video.error
    return (await client.videos.download_content(video_id)).content


def test_a_video_is_created_polled_downloaded_and_deleted(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        video = await client.videos.create(prompt="a boat", seconds="0.5", size="32x32", extra_body={**SMALL, "fps": 8})  # type: ignore[arg-type]
        assert (video.object, video.model, video.size, video.prompt) == ("video", MODEL, "32x32", "a boat")
        video = await client.videos.poll(video.id, poll_interval_ms=20)

        assert (video.status, video.progress, video.error) == ("completed", 100, None)
        assert video.seconds == "0.625"  # 5 frames are the nearest that the model supports
        assert video.expires_at is not None and video.expires_at > time.time()
        file = await client.videos.download_content(video.id)
        assert file.response.headers["content-type"] == "video/mp4"
        assert frames_of(file.content) == (5, (32, 32), 8.0)

        deleted = await client.videos.delete(video.id)
        assert deleted.deleted and deleted.object == "video.deleted"
        with pytest.raises(openai.NotFoundError):
            await client.videos.download_content(video.id)

    use(app, main)


def test_videos_are_listed_in_pages(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        made = [
            await client.videos.create_and_poll(
                prompt=f"boat {i}", size="32x32", poll_interval_ms=20, extra_body={**SMALL, "num_frames": 1}
            )  # type: ignore[call-overload]
            for i in range(3)
        ]
        assert [video.prompt async for video in client.videos.list(limit=2)] == ["boat 2", "boat 1", "boat 0"]
        page = await client.videos.list(order="asc", after=made[0].id, limit=1)
        assert [video.id for video in page.data] == [made[1].id] and page.has_more
        for video in made:
            await client.videos.delete(video.id)
        assert [video async for video in client.videos.list()] == []

    use(app, main)


def test_a_running_video_is_aborted_when_it_is_deleted(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        video = await client.videos.create(prompt="a boat", size="64x64", extra_body=LONG)  # type: ignore[arg-type]
        assert video.status in ("queued", "in_progress")
        with pytest.raises(openai.ConflictError, match="not complete yet"):
            await client.videos.download_content(video.id)
        await client.videos.delete(video.id)
        assert is_idle(app.state.engine_client.llm)

    use(app, main)


def test_a_video_is_visible_to_its_api_key_only(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        one, other = (client.with_options(api_key=key) for key in ("one", "other"))
        fields = {"size": "32x32", "poll_interval_ms": 20, "extra_body": {**SMALL, "num_frames": 1}}
        video = await one.videos.create_and_poll(prompt="one's boat", **fields)
        await other.videos.create_and_poll(prompt="other's boat", **fields)

        assert [video.prompt async for video in one.videos.list()] == ["one's boat"]
        assert [video.prompt async for video in other.videos.list()] == ["other's boat"]
        remix = functools.partial(other.videos.remix, prompt="a ship")
        for call in (other.videos.retrieve, other.videos.download_content, other.videos.delete, remix):
            with pytest.raises(openai.NotFoundError) as hidden:
                await call(video.id)
            with pytest.raises(openai.NotFoundError) as missing:
                await call("video-none")
            assert str(hidden.value).replace(video.id, "video-none") == str(missing.value)
        with pytest.raises(openai.BadRequestError, match="there is no video"):
            await other.videos.list(after=video.id)
        with pytest.raises(openai.AuthenticationError):
            await client.videos.list()
        assert frames_of(await downloaded(one, video.id))[0] == 1

    use(with_flags(app, "--api-key", "one", "other"), main)


def test_deleting_a_video_before_it_is_accepted_answers_its_post(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        builder = app.state.engine_client.llm._pipeline.builder
        with builder.lock:  # Another prompt is being preprocessed.
            creation = asyncio.create_task(client.videos.create(prompt="a boat", size="32x32", extra_body=SMALL))  # type: ignore[arg-type]
            while not (listed := [video async for video in client.videos.list()]):
                await asyncio.sleep(0)
            await client.videos.delete(listed[0].id)
            with pytest.raises(openai.APIStatusError, match="was deleted before it was started") as error:
                await asyncio.wait_for(creation, 60)
            assert error.value.status_code == 410  # Clients do not send the request again.
        assert [video async for video in client.videos.list()] == []
        assert is_idle(app.state.engine_client.llm)

    use(app, main)


def test_a_remix_changes_only_the_prompt(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        video = await client.videos.create(
            prompt="a boat",
            size="32x64",  # type: ignore[arg-type]
            extra_body={"num_inference_steps": 2, "num_frames": 5, "fps": 8},
        )
        file = await downloaded(client, video.id)
        same, other = [await client.videos.remix(video.id, prompt=prompt) for prompt in ("a boat", "a ship")]

        assert (other.remixed_from_video_id, other.prompt, other.model) == (video.id, "a ship", video.model)
        assert (other.size, other.seconds) == ("32x64", "0.625")
        again, remixed = [await downloaded(client, made.id) for made in (same, other)]
        # Concurrent requests change the rounding, and the codec amplifies it.
        assert difference(again, file) < difference(remixed, file) / 4
        assert frames_of(remixed) == frames_of(file)
        for made in (video, same, other):
            await client.videos.delete(made.id)

    use(app, main)


def test_only_a_complete_video_is_remixed(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        video = await client.videos.create(prompt="a boat", size="64x64", extra_body=LONG)  # type: ignore[arg-type]
        with pytest.raises(openai.ConflictError, match="not complete yet"):
            await client.videos.remix(video.id, prompt="a ship")
        with pytest.raises(openai.BadRequestError, match="prompt"):
            await client.videos.remix(video.id, prompt="")
        await client.videos.delete(video.id)

    use(app, main)


def test_flags_set_the_limits_of_the_store(app: FastAPI, tmp_path: Path) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        for prompt in ("a boat", "a ship"):
            video = await client.videos.create_and_poll(
                prompt=prompt, size="32x32", poll_interval_ms=20, extra_body={**SMALL, "num_frames": 1}
            )  # type: ignore[call-overload]
        assert [video.prompt async for video in client.videos.list()] == ["a ship"]
        assert video.expires_at - video.completed_at == 7200
        assert [file.name for file in tmp_path.glob("*/*")] == [f"{video.id}.mp4"]

    flags = ("--video-dir", str(tmp_path), "--max-stored-videos", "1", "--video-expires-after-s", "7200")
    use(with_flags(app, *flags), main)


def test_a_running_video_does_not_hold_the_body_of_its_request(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def handler(request: Request) -> videos.ServingVideos:
        requests.append(weakref.ref(request))
        return app.state.omni_handlers["video"]

    async def main(client: openai.AsyncOpenAI) -> None:
        video = await client.videos.create(prompt="a boat", size="64x64", extra_body=LONG)  # type: ignore[arg-type]
        for _ in range(10):  # The task that waits for a disconnect is cancelled, and ends in its next step.
            await asyncio.sleep(0)
        gc.collect()
        assert requests[0]() is None
        assert (await client.videos.retrieve(video.id)).status in ("queued", "in_progress")
        await client.videos.delete(video.id)

    monkeypatch.setattr(videos, "_handler", handler)
    use(app, main)


def test_an_error_of_the_stage_is_in_the_job(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "check_num_frames", lambda *_: None)  # As for what only the stage finds out.

    async def main(client: openai.AsyncOpenAI) -> None:
        video = await client.videos.create_and_poll(
            prompt="a boat", size="32x32", poll_interval_ms=20, extra_body={**SMALL, "num_frames": 6}
        )  # type: ignore[call-overload]
        assert video.status == "failed" and video.error.code == "bad_request"
        assert "num_frames 6" in video.error.message
        with pytest.raises(openai.ConflictError, match="num_frames 6"):
            await client.videos.download_content(video.id)
        await client.videos.delete(video.id)

    use(app, main)


def test_too_many_videos_are_refused_and_leak_nothing(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        ids = []
        with pytest.raises(openai.RateLimitError) as error:
            for _ in range(20):
                video = await client.videos.create(prompt="a boat", size="64x64", extra_body=LONG)  # type: ignore[arg-type]
                ids.append(video.id)
        assert int(error.value.response.headers["retry-after"]) >= 1
        assert {video.id async for video in client.videos.list()} == set(ids)
        for video_id in ids:
            await client.videos.delete(video_id)

    use(app, main)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seconds": "0"}, "greater than 0"),
        ({"seconds": "four"}, "valid number"),
        ({"seconds": 1, "num_frames": 5}, "keep one of them"),
        ({"seconds": 3000}, "max_frames"),
        ({"size": "640"}, "pattern"),
        ({"size": "100x100"}, "size 100x100: `height` and `width` have to be divisible by 16"),
        ({"extra_body": {"height": 24, "width": 32}}, "size 32x24"),
        ({"num_frames": 6}, "the nearest are 5 and 9"),
        ({"extra_body": {"num_outputs_per_prompt": 2}}, "one video"),
        ({"frames": 5}, "is not a field of this request"),
        ({"input_reference": URI}, "video"),
        ({"video": "data:video/mp4;base64,AAAA"}, "video"),
        ({"inputs": {"last_image": URI}}, "WanPipeline takes no 'last_image' (it takes video)"),
        ({"inputs": {"video": URI}, "video": URI}, "inputs and video set the same"),
        ({"input_reference": "data:image/png;base64,AAAA"}, "video"),
    ],
)
def test_wrong_fields_are_named(app: FastAPI, fields: dict[str, Any], words: str) -> None:
    answer = send(app, "POST", "/v1/videos", json={"prompt": "a boat", **fields})

    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert send(app, "GET", "/v1/videos").json()["data"] == []


def test_a_video_is_downloaded_in_parts(app: FastAPI) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        video = await client.videos.create(prompt="a boat", size="32x32", extra_body={**SMALL, "num_frames": 1})  # type: ignore[arg-type]
        file = await downloaded(client, video.id)
        http, path = client._client, f"/v1/videos/{video.id}/content"

        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["accept-ranges"] == "bytes" and int(head.headers["content-length"]) == len(file)
        first = await http.get(path, headers={"Range": "bytes=0-1"})  # as Safari begins
        assert (first.status_code, first.content) == (206, file[:2])
        assert first.headers["content-range"] == f"bytes 0-1/{len(file)}"
        rest = await http.get(path, headers={"Range": "bytes=2-", "If-Range": first.headers["etag"]})
        assert (rest.status_code, rest.content) == (206, file[2:])
        beyond = await http.get(path, headers={"Range": f"bytes={len(file)}-"})
        assert beyond.status_code == 416
        await client.videos.delete(video.id)
        assert (await http.head(path)).status_code == 404

    use(app, main)


def test_unknown_videos_and_variants(app: FastAPI) -> None:
    assert send(app, "GET", "/v1/videos/none").status_code == 404
    assert send(app, "DELETE", "/v1/videos/none").status_code == 404
    assert send(app, "GET", "/v1/videos/none/content?variant=thumbnail").status_code == 400
    assert send(app, "GET", "/v1/videos?after=none").status_code == 400


def test_a_video_is_made_of_another_one(app: FastAPI) -> None:
    """As a file and as JSON by the pipeline's name, and as OpenAI's field for references."""

    async def main(client: openai.AsyncOpenAI) -> None:
        fields: dict[str, Any] = {"prompt": "a boat", "size": "32x32"}
        extra = {**SMALL, "num_inference_steps": 3}
        video = await client.videos.create(**fields, extra_body={**extra, "num_frames": 5})
        file = await downloaded(client, video.id)
        changed = {**extra, "strength": 0.7, "seed": 3}
        uri = "data:video/mp4;base64," + base64.b64encode(file).decode()
        upload = ("a.mp4", file, "video/mp4")
        own = await client.videos.create(**fields, input_reference=upload, extra_body=changed)
        ids, files = [own.id], [await downloaded(client, own.id)]
        for request in (
            {"data": {**fields, **changed}, "files": {"video": upload}},
            {"json": {**fields, **changed, "video": {"video_url": uri}}},
            {"json": {**fields, **changed, "video": uri, "seed": 4}},
        ):
            answer = await client._client.post("/v1/videos", **request)
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["id"])
            files.append(await downloaded(client, ids[-1]))
        assert [frames_of(each)[:2] for each in files] == [(5, (32, 32))] * 4
        assert max(difference(files[0], each) for each in files[1:3]) < difference(files[0], files[3]) / 4
        with pytest.raises(openai.BadRequestError, match="made of video, which the server has not kept"):
            await client.videos.remix(ids[0], prompt="a ship")
        for video_id in (video.id, *ids):
            await client.videos.delete(video_id)
        assert app.state.omni_handlers["video"].media._connector._budget.taken_bytes == 0

    use(app, main)


def test_a_video_starts_from_an_image(tiny_diffusion: Callable[[str], Path]) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        video = await client.videos.create(
            prompt="a boat",
            size="32x32",  # type: ignore[arg-type]
            input_reference=("a.png", png(), "image/png"),
            extra_body={**SMALL, "num_frames": 5},
        )
        body = {"prompt": "a boat", "size": "32x32", "input_reference": {"image_url": URI}, "num_frames": 5, **SMALL}
        other = (await client._client.post("/v1/videos", json=body)).json()
        files = [await downloaded(client, video_id) for video_id in (video.id, other["id"])]
        # Equal requests differ in the last bits where memory is aligned in another way, which the codec enlarges.
        different = await client.videos.create(
            prompt="a boat",
            size="32x32",  # type: ignore[arg-type]
            input_reference=("a.png", png(color="blue"), "image/png"),
            extra_body={**SMALL, "num_frames": 5},
        )
        different_file = await downloaded(client, different.id)
        assert difference(*files) < difference(files[0], different_file) / 4 and frames_of(files[0])[0] == 5
        remixed = await client.videos.remix(video.id, prompt="a boat")  # From its first frame.
        assert frames_of(await downloaded(client, remixed.id)) == frames_of(files[0])

        folder = app.state.omni_handlers["video"].store.get(video.id, NO_KEY).path.parent
        assert len(list(folder.iterdir())) == 4
        async with app.router.lifespan_context(app):  # The end of the server removes the files.
            pass
        assert not folder.exists()

    with serving(tiny_diffusion("wan_i2v")) as app:
        use(app, main)


def test_a_video_has_its_sound(tiny_diffusion: Callable[[str], Path]) -> None:
    path = tiny_diffusion("ltx2")
    call = {"num_inference_steps": 2, "num_frames": 9}
    _, sound = DiffusersOracle(path).generate_all("a boat", seed=1, height=64, width=64, **call)

    async def main(client: openai.AsyncOpenAI) -> bytes:
        video = await client.videos.create(prompt="a boat", size="64x64", extra_body={**call, "seed": 1})  # type: ignore[arg-type]
        return await downloaded(client, video.id)

    with serving(path) as app:
        file = use(app, main)
    assert frames_of(file) == (9, (64, 64), 24.0)
    with av.open(io.BytesIO(file)) as container:
        assert container.streams.audio[0].rate == 24_000
        played = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    played = played[:, : sound.shape[1]]
    assert np.corrcoef(played.ravel(), sound.numpy().ravel())[0, 1] > 0.9


def test_a_video_is_made_with_an_adapter(app: FastAPI, tiny_diffusion: Callable[[str], Path], tmp_path: Path) -> None:
    ink = write_tiny_diffusion_lora(tiny_diffusion("wan"), tmp_path)

    async def main(client: openai.AsyncOpenAI) -> list[bytes]:
        files = []
        for model in (MODEL, "ink"):
            video = await client.videos.create(
                model=model,
                prompt="a boat",
                size="32x32",  # type: ignore[arg-type]
                extra_body={**SMALL, "num_frames": 5},
            )
            assert video.model == model
            files.append(await downloaded(client, video.id))
            await client.videos.delete(video.id)
        return files

    plain, inked = use(with_flags(app, "--lora-modules", f"ink={ink}"), main)
    assert frames_of(plain) == frames_of(inked) and plain != inked


def test_frames_of_a_duration() -> None:
    assert [nearest_num_frames(seconds, 16, 4) for seconds in (0.01, 1, 4, 5)] == [1, 17, 65, 81]
    assert nearest_num_frames(2, 25, 8) == 49 and nearest_num_frames(2, 25, 1) == 50


def new_video(name: str) -> Video:
    return Video(id=name, model="m", created_at=0, prompt="p", seconds="1", size="1x1")


def test_the_bytes_of_the_videos_of_all_keys_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        store = VideoStore(ServerLimits(video_dir=str(tmp_path), max_total_stored_video_bytes=10))

        async def make(name: str, owner: bytes, size: int) -> Video:
            async def work(job: VideoJob) -> None:
                await store.complete(job, b"1" * size)

            job = store.start(new_video(name), work, owner=owner, settings={}, has_image=False)
            assert job.task is not None
            await job.task
            return job.video

        await make("other's", b"other", 6)
        await make("first", b"one", 3)
        failed = await make("large", b"one", 5)
        assert failed.status == "failed" and failed.error is not None and failed.error.code == "no_room"
        assert store.get("first", b"one").path.exists() and not store.get("large", b"one").path.exists()
        assert (await make("second", b"one", 4)).status == "completed"
        videos, _ = store.page(b"one", None, 9, newest_first=False)
        assert [video.id for video in videos] == ["large", "second"], "a key's own oldest make room"
        assert store.get("other's", b"other").path.exists()
        await store.close()

    asyncio.run(main())


def test_the_store_is_limited_in_number_bytes_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        limits = ServerLimits(
            video_dir=str(tmp_path), max_stored_videos=3, max_stored_video_bytes=10, video_expires_after_s=3600
        )
        store = VideoStore(limits)

        def start(name: str, make: Callable[[VideoJob], Coroutine[Any, Any, None]], owner: bytes = NO_KEY) -> VideoJob:
            return store.start(new_video(name), make, owner=owner, settings={}, has_image=False)

        def names(*, newest_first: bool = False) -> list[str]:
            return [video.id for video in store.page(NO_KEY, None, 9, newest_first=newest_first)[0]]

        async def work(job: VideoJob) -> None:
            await store.complete(job, b"1234")

        async def work_too_much(job: VideoJob) -> None:
            await store.complete(job, b"1" * 11)

        async def never(job: VideoJob) -> None:
            await asyncio.Event().wait()

        async def make(name: str, owner: bytes = NO_KEY) -> VideoJob:
            job = start(name, work, owner)
            assert job.task is not None
            await job.task
            return job

        other = await make("other's", b"other")
        jobs = [await make(name) for name in "abc"]  # one by one: which file is written last decides what is removed
        assert names() == ["b", "c"]  # bytes
        assert jobs[1].path.is_relative_to(tmp_path)
        assert not jobs[0].path.exists() and jobs[1].path.read_bytes() == b"1234"

        large = start("large", work_too_much)
        assert large.task is not None
        await large.task
        assert large.video.error is not None and large.video.error.code == "too_large"

        runs = [start(f"n{i}", never) for i in range(3)]  # number: ended ones are removed
        assert names(newest_first=True) == ["n2", "n1", "n0"]
        assert other.path.exists() and store.get("other's", b"other") is other, "one key's remove none of another's"
        with pytest.raises(PipelineFullError):
            start("n3", never)
        with pytest.raises(VLLMValidationError, match="there is no video"):
            store.page(NO_KEY, "b", 9, newest_first=True)

        await store.delete(runs[0])
        assert runs[0].task is not None and runs[0].task.cancelled()
        last = start("last", work)
        assert last.task is not None
        await last.task
        assert last.path.exists()
        await pass_time(3600, monkeypatch)
        with pytest.raises(VLLMNotFoundError, match="expired"):  # time
            store.get("last", NO_KEY)
        assert not last.path.exists()
        await store.close()
        assert not last.path.parent.exists() and all(job.task and job.task.cancelled() for job in runs)

    asyncio.run(main())
