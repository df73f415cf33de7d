# SPDX-License-Identifier: Apache-2.0
"""/v1/videos, as OpenAI has it, for any pipeline that gives videos: a video is a job that its client asks after."""

import asyncio
import logging
import secrets
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.responses import StreamingResponse
from PIL import Image
from starlette.datastructures import State
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.exceptions import VLLMValidationError

from vllm_omni.diffusion.pipeline_info import nearest_num_frames, temporal_factor
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import OmniHTTPError, to_http_error
from vllm_omni.entrypoints.openai.images import RESPONSES
from vllm_omni.entrypoints.openai.limits import ServerLimits, limits_from
from vllm_omni.entrypoints.openai.media_inputs import ImageFetcher, form_description, read_request
from vllm_omni.entrypoints.openai.media_messages import as_video_file, describe_video, read_first_frame
from vllm_omni.entrypoints.openai.media_stage import MediaMaker, MediaStage, missing_media, new_id
from vllm_omni.entrypoints.openai.middleware import owner_of
from vllm_omni.entrypoints.openai.video_protocol import RemixRequest, Video, VideoDeleted, VideoList, VideoRequest
from vllm_omni.entrypoints.openai.video_store import VideoJob, VideoStore
from vllm_omni.errors import OmniError
from vllm_omni.events import CompletedEvent, ImageProgressEvent, OmniEvent

logger = logging.getLogger("vllm.omni.server")

_CHUNK_BYTES = 1 << 18
_MAX_PAGE = 100
_NUM_SEEDS = 1 << 32
_RETRY_S = 1.0

VideoId = Annotated[str, Path(max_length=200, description="Of a video that this server makes, or has made.")]


class ServingVideos:
    """Makes videos of one pipeline."""

    def __init__(self, maker: MediaMaker, fetcher: ImageFetcher, store: VideoStore, factor: int) -> None:
        """
        Args:
            factor: See `temporal_factor`.
        """
        self._maker = maker
        self._fetcher = fetcher
        self._factor = factor
        self.store = store

    async def create(self, request: VideoRequest, raw_request: Request) -> Video:
        """Begins a video; returns when the pipeline has taken the request.

        Raises:
            VLLMClientError, OmniError: The request is wrong, or is refused.
        """
        self._maker.check_model(request.model)
        settings = self._settings(request)
        self._maker.client.check_admission()
        images = await self._fetcher.fetch(request.input_reference or [], "input_reference")
        video = self._describe(request.prompt, request.model or self._maker.model_name, settings)
        return await self._start(video, settings, images, raw_request)

    async def remix(self, video_id: str, prompt: str, raw_request: Request) -> Video:
        """Begins a video with the settings and the seed of another one, and with its first frame if that was a picture
        that it started from.

        Raises:
            VLLMNotFoundError: There is no such video.
            OmniHTTPError: It is not complete, or never will be.
            OmniError: The request is refused.
        """
        source = self._completed(video_id, owner_of(raw_request))
        self._maker.client.check_admission()
        images = [await asyncio.to_thread(read_first_frame, source.path)] if source.has_picture else []
        video = self._describe(prompt, source.video.model, source.settings)
        video.remixed_from_video_id = video_id
        return await self._start(video, source.settings, images, raw_request)

    async def _start(
        self, video: Video, settings: Mapping[str, Any], images: list[Image.Image], raw_request: Request
    ) -> Video:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Made here: the job must not hold the HTTP request, whose body may be large.
        events = self._maker.events(
            video.prompt,
            settings,
            images,
            raw_request,
            request_id=video.id,
            stream=True,
            on_accepted=partial(_settle, accepted),
        )

        async def make(job: VideoJob) -> None:
            try:
                await self._make(job, events)
            except Exception as error:
                if accepted.done():
                    self._fail(job, error)
                else:
                    _settle(accepted, error)

        owner = owner_of(raw_request)
        job = self.store.start(video, make, owner=owner, settings=settings, has_picture=bool(images))
        assert job.task is not None
        job.task.add_done_callback(lambda _: _settle(accepted, _deleted(job)))
        try:
            await accepted
        except BaseException:  # It was refused or deleted, or its client has left without knowing its id.
            await self.store.delete(job)
            raise
        return video

    async def _make(self, job: VideoJob, events: AsyncGenerator[OmniEvent, None]) -> None:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ImageProgressEvent):
                    job.video.status = "in_progress"
                    job.video.progress = min(99, 100 * (event.step + 1) // event.num_steps)
                elif isinstance(event, CompletedEvent):
                    output = event.outputs[0]
                    file = await asyncio.to_thread(as_video_file, output.videos[0], output.fps)
                    job.video.size, job.video.seconds = await asyncio.to_thread(describe_video, file)
                    await self.store.complete(job, file)

    def _fail(self, job: VideoJob, error: Exception) -> None:
        """Nobody waits for the job: what has happened to it is told to who asks after it."""
        if not isinstance(error, OmniError):
            logger.error("video %s failed", job.video.id, exc_info=error)
            self.store.fail(job, "internal_server_error", "internal error; the server's log says more")
        else:
            failure = to_http_error(error)
            self.store.fail(job, failure.http_status.name.lower(), failure.message)

    def _settings(self, request: VideoRequest) -> dict[str, Any]:
        settings = self._maker.with_adapter(request.settings(), request.model)
        if self._maker.stage.info is None:
            return {name: value for name, value in settings.items() if name != "output_format"}
        if self._maker.stage.expected("seed", settings) is None:
            settings["seed"] = secrets.randbelow(_NUM_SEEDS)  # Drawn here, so that a remix can have the same.
        if request.seconds is not None:
            settings["fps"] = self._maker.stage.expected_fps(settings)
            settings["num_frames"] = nearest_num_frames(request.seconds, settings["fps"], self._factor)
        return settings

    def _describe(self, prompt: str, model: str, settings: Mapping[str, Any]) -> Video:
        num_frames = self._maker.stage.expected("num_frames", settings)
        seconds = num_frames and num_frames / self._maker.stage.expected_fps(settings)
        return Video(
            id=new_id("video"),
            model=model,
            created_at=int(time.time()),
            prompt=prompt,
            seconds=f"{seconds:g}" if seconds else "auto",
            size=self._maker.stage.expected_size(settings) or "auto",
        )

    async def open(self, video_id: str, owner: bytes) -> tuple[BinaryIO, int]:
        """The file of a video that is complete, and its size. Stays readable if the video is deleted meanwhile.

        Raises:
            VLLMNotFoundError: There is no such video.
            OmniHTTPError: It is not complete, or never will be.
        """
        job = self._completed(video_id, owner)
        return await asyncio.to_thread(job.path.open, "rb"), job.num_bytes

    def _completed(self, video_id: str, owner: bytes) -> VideoJob:
        job = self.store.get(video_id, owner)
        video = job.video
        if video.error is not None:
            raise OmniHTTPError(f"video {video_id} failed: {video.error.message}", HTTPStatus.CONFLICT)
        if video.status != "completed":
            message = f"video {video_id} is not complete yet ({video.progress}%); ask again later"
            raise OmniHTTPError(message, HTTPStatus.CONFLICT, _RETRY_S)
        return job


def _settle(future: "asyncio.Future[None]", error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _deleted(job: VideoJob) -> OmniHTTPError:
    """For the request that creates a video while another one deletes it. No status that clients try again after."""
    return OmniHTTPError(f"video {job.video.id} was deleted before it was started", HTTPStatus.GONE)


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    handler: ServingVideos | None = app.state.omni_videos
    if handler is not None:
        await handler.store.close()


router = APIRouter(lifespan=_lifespan)


def _videos(raw_request: Request) -> ServingVideos:
    handler: ServingVideos | None = raw_request.app.state.omni_videos
    if handler is None:
        raise missing_media(raw_request.app.state.engine_client.config, "video")
    return handler


async def _video_request(raw_request: Request) -> VideoRequest:
    return await read_request(raw_request, VideoRequest, "input_reference")


@router.post(
    "/v1/videos", responses=RESPONSES, openapi_extra=form_description(VideoRequest, "input_reference", several=False)
)
@with_cancellation
@load_aware_call
async def create_video(request: Annotated[VideoRequest, Depends(_video_request)], raw_request: Request) -> Video:
    """Begins a video that a prompt describes, and perhaps a picture. Ask after it until its status is completed."""
    return await _videos(raw_request).create(request, raw_request)


@router.post("/v1/videos/{video_id}/remix", dependencies=[Depends(validate_json_request)], responses=RESPONSES)
@with_cancellation
@load_aware_call
async def remix_video(video_id: VideoId, raw_request: Request, request: RemixRequest) -> Video:
    """Begins a video with the settings and the seed of one that is completed, and another prompt."""
    return await _videos(raw_request).remix(video_id, request.prompt, raw_request)


@router.get("/v1/videos", responses=RESPONSES)
async def list_videos(
    raw_request: Request,
    after: Annotated[str | None, Query(description="Those that come after this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")] = "desc",
) -> VideoList:
    """All videos of this API key that the server has not forgotten."""
    store = _videos(raw_request).store
    videos, has_more = store.page(owner_of(raw_request), after, limit, newest_first=order == "desc")
    first, last = (videos[0].id, videos[-1].id) if videos else (None, None)
    return VideoList(data=videos, first_id=first, last_id=last, has_more=has_more)


@router.get("/v1/videos/{video_id}", responses=RESPONSES)
async def retrieve_video(video_id: VideoId, raw_request: Request) -> Video:
    """How far a video has come."""
    return _videos(raw_request).store.get(video_id, owner_of(raw_request)).video


@router.get(
    "/v1/videos/{video_id}/content",
    response_class=StreamingResponse,
    responses={
        **RESPONSES,
        HTTPStatus.CONFLICT.value: {"model": ErrorResponse, "description": "It is not complete, or has failed."},
        HTTPStatus.OK.value: {"content": {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}},
    },
)
async def download_video(
    video_id: VideoId,
    raw_request: Request,
    variant: Annotated[str, Query(description="Only video: there are no thumbnails or sprite sheets.")] = "video",
) -> StreamingResponse:
    """The MP4 file of a video that is completed."""
    if variant != "video":
        raise VLLMValidationError("there is only the variant 'video'", parameter="variant")
    file, num_bytes = await _videos(raw_request).open(video_id, owner_of(raw_request))
    return StreamingResponse(_chunks(file), media_type="video/mp4", headers={"Content-Length": str(num_bytes)})


@router.delete("/v1/videos/{video_id}", responses=RESPONSES)
async def delete_video(video_id: VideoId, raw_request: Request) -> VideoDeleted:
    """Forgets a video; one that is not complete is given up."""
    store = _videos(raw_request).store
    await store.delete(store.get(video_id, owner_of(raw_request)))
    return VideoDeleted(id=video_id)


def attach_router(app: FastAPI) -> None:
    app.include_router(router)


def init_state(state: State, client: OmniEngineClient, args: Namespace) -> None:
    stage = MediaStage.find(client.config, "video", args.model)
    state.omni_videos = None
    if stage is not None:
        store = VideoStore(limits_from(args, ServerLimits))
        maker = MediaMaker(client, state.openai_serving_models, stage)
        state.omni_videos = ServingVideos(maker, ImageFetcher(args), store, _factor(stage, args.model))


def _factor(stage: MediaStage, model: str) -> int:
    if stage.info is None:
        return 1
    return temporal_factor(stage.stage.checkpoint(model), stage.info.index, stage.stage.engine_args.get("revision"))
