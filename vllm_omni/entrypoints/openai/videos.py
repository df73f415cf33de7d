# SPDX-License-Identifier: Apache-2.0
"""/v1/videos, as in OpenAI's API, for any pipeline that makes videos: a video is a job that its client polls."""

import asyncio
import logging
import secrets
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from openai.types import VideoDeleteResponse
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import State
from vllm.exceptions import VLLMValidationError

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.diffusion.pipeline_info import check_num_frames, check_size, nearest_num_frames, temporal_factor
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import FORM_ERRORS, OmniHTTPError, to_http_error
from vllm_omni.entrypoints.openai.media_endpoint import DiffusionEndpoint, closing_store, get_handler, new_id
from vllm_omni.entrypoints.openai.media_output import as_video_files, describe_video, read_first_frame
from vllm_omni.entrypoints.openai.media_request import ImageUrls, InputsRequest, Prompt
from vllm_omni.entrypoints.openai.request_context import RequestContext, model_route
from vllm_omni.entrypoints.openai.server_args import ServerLimits, limits_from
from vllm_omni.entrypoints.openai.video_store import Video, VideoJob, VideoStore
from vllm_omni.errors import OmniError
from vllm_omni.events import CompletedEvent, ImageProgressEvent, OmniEvent
from vllm_omni.vllm_protocol import ErrorResponse

logger = logging.getLogger("vllm.omni.server")

_MAX_PAGE = 100
_NUM_SEEDS = 1 << 32
_RETRY_S = 1.0

_FILE = {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}

VideoId = Annotated[str, PathParameter(max_length=200, description="Of a video that this server makes, or has made.")]


class VideoRequest(InputsRequest):
    """A request for a video."""

    file_field, output_type = "input_reference", "video"

    seconds: float | None = Field(
        None,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="Length; the nearest that the model supports. Default: the model's own, or num_frames.",
        examples=["4"],
    )
    num_frames: int | None = Field(None, ge=1, description="Frames; in place of seconds.", examples=[81])
    fps: float | None = Field(None, gt=0, le=240, allow_inf_nan=False, description="Frames per second.", examples=[16])
    input_reference: ImageUrls | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="The first frame: a file in a form; in JSON a data URI or an address (image_url). For a model that "
        "changes videos, a video.",
    )

    def settings(self) -> dict[str, Any]:
        given = super().settings()
        if given.get("num_outputs_per_prompt", 1) != 1:
            raise VLLMValidationError(
                "a request makes one video; send several", parameter="extra_body.num_outputs_per_prompt"
            )
        if self.seconds is not None and "num_frames" in given:
            raise VLLMValidationError("seconds and num_frames set the same; keep one of them", parameter="seconds")
        return {**given, "output_format": "mp4"}


class RemixRequest(BaseModel):
    """A request for a video like another one."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt


class VideoList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ServingVideos(DiffusionEndpoint):
    """The handler of all endpoints.

    Attributes:
        store: The jobs.
    """

    kind = "video"

    def __init__(self, state: State, client: OmniEngineClient, stage: OmniStageConfig, args: Namespace) -> None:
        super().__init__(state, client, stage, args)
        info, revision = self.info, stage.engine_args.get("revision")
        self._factor = 1 if info is None else temporal_factor(stage.checkpoint(args.model), info.index, revision)
        self.store = VideoStore(limits_from(args, ServerLimits))

    async def create(self, request: VideoRequest, raw_request: Request) -> Video:
        """Starts a video; returns when the pipeline has accepted the request.

        Raises:
            VLLMClientError, OmniError: The request is wrong, or is refused.
        """
        self.check_model(request.model)
        self.check_prompt(request.prompt)
        settings = self._settings(request)
        first, urls = request.input_reference or [], dict(request.inputs or {})
        takes = [] if self.info is None else self.info.media
        if first and "video" in takes and "image" not in takes:
            first, urls = [], {"video": [*first], **urls}
        self._check_size(settings, [*(["image"] if first else []), *urls])
        images = await self.media.images(first, "input_reference")
        inputs = await self.read_inputs(urls, bool(first))
        video = self._describe(request.prompt, request.model or self.model_names[0], settings)
        return await self._start(video, settings, images, raw_request, request.priority, inputs)

    async def remix(self, video_id: str, prompt: str, raw_request: Request) -> Video:
        """Starts a video with the settings and the seed of another one, and from its first frame if that had an
        `input_reference`.

        Raises:
            VLLMNotFoundError: There is no such video.
            OmniHTTPError: It is not complete, or failed.
            OmniError: The request is refused.
        """
        source = self.completed_job(video_id, raw_request)
        if source.inputs:
            raise VLLMValidationError(
                f"the video was made of {', '.join(source.inputs)}, which the server has not kept; send a new request",
                parameter="video_id",
            )
        self.client.check_admission()
        images = [await asyncio.to_thread(read_first_frame, source.path)] if source.has_image else []
        video = self._describe(prompt, source.video.model, source.settings)
        video.remixed_from_video_id = video_id
        return await self._start(video, source.settings, images, raw_request)

    async def _start(
        self,
        video: Video,
        settings: Mapping[str, Any],
        images: list[Image.Image],
        raw_request: Request,
        priority: int = 0,
        inputs: Mapping[str, Any] | None = None,
    ) -> Video:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Made here, because the job must not hold the HTTP request, whose body may be large.
        events = self.generate(
            video.prompt,
            settings,
            images,
            raw_request,
            video.id,
            inputs,
            stream=True,
            priority=priority,
            on_accepted=partial(_resolve, accepted),
        )

        async def make(job: VideoJob) -> None:
            try:
                await self._make(job, events)
            except Exception as error:
                if accepted.done():
                    self._fail(job, error)
                else:
                    _resolve(accepted, error)

        owner = RequestContext.of(raw_request).owner
        job = self.store.start(
            video, make, owner=owner, settings=settings, has_image=bool(images), inputs=list(inputs or {})
        )
        assert job.task is not None
        job.task.add_done_callback(lambda _: _resolve(accepted, _deleted(job)))
        try:
            await accepted
        except BaseException:  # Refused or deleted, or the client has disconnected without the id.
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
                    (file,) = await asyncio.to_thread(as_video_files, output)
                    job.video.size, job.video.seconds = await asyncio.to_thread(describe_video, file)
                    await self.store.complete(job, file)

    def _fail(self, job: VideoJob, error: Exception) -> None:
        """Keeps the error of a job, for its client's next poll."""
        if not isinstance(error, OmniError):
            logger.error("video %s failed", job.video.id, exc_info=error)
            self.store.fail(job, "internal_server_error", "internal error; see the server's log")
        else:
            failure = to_http_error(error)
            self.store.fail(job, failure.http_status.name.lower(), failure.message)

    def _settings(self, request: VideoRequest) -> dict[str, Any]:
        settings = self.with_adapter(request.settings(), request.model)
        if self.info is None:
            return {name: value for name, value in settings.items() if name != "output_format"}
        if self.expected("seed", settings) is None:
            settings["seed"] = secrets.randbelow(_NUM_SEEDS)  # Chosen here, so that a remix can use the same.
        if request.seconds is not None:
            settings["fps"] = self.expected_fps(settings)
            settings["num_frames"] = nearest_num_frames(request.seconds, settings["fps"], self._factor)
        return settings

    def _check_size(self, settings: Mapping[str, Any], media: Sequence[str]) -> None:
        """Refuses now what the stage would refuse when the job begins.

        Raises:
            VLLMValidationError: The model does not make this size, or this number of frames.
        """
        info = self.info
        if info is None:
            return
        height, width, num_frames = (self.expected(name, settings) for name in ("height", "width", "num_frames"))
        parameter = "num_frames"
        try:
            if num_frames:
                check_num_frames(num_frames, self._factor)
            parameter = "size"
            if height and width:
                check_size(info.class_for([name for name in media if name in info.media]), height, width)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=parameter) from error

    def _describe(self, prompt: str, model: str, settings: Mapping[str, Any]) -> Video:
        num_frames = self.expected("num_frames", settings)
        seconds = num_frames and num_frames / self.expected_fps(settings)
        return Video(
            id=new_id(self.kind),
            model=model,
            created_at=int(time.time()),
            prompt=prompt,
            seconds=f"{seconds:g}" if seconds else "auto",
            size=self.expected_size(settings) or "auto",
        )

    def completed_job(self, video_id: str, raw_request: Request) -> VideoJob:
        """
        Raises:
            VLLMNotFoundError: There is no such video.
            OmniHTTPError: It is not complete, or failed.
        """
        job = self.store.get(video_id, RequestContext.of(raw_request).owner)
        video = job.video
        if video.error is not None:
            raise OmniHTTPError(f"video {video_id} failed: {video.error.message}", HTTPStatus.CONFLICT)
        if video.status != "completed":
            message = f"video {video_id} is not complete yet ({video.progress}%); poll it again later"
            raise OmniHTTPError(message, HTTPStatus.CONFLICT, _RETRY_S)
        return job


def _resolve(future: "asyncio.Future[None]", error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _deleted(job: VideoJob) -> OmniHTTPError:
    """The error of a request whose video another request deletes, with a status that clients do not retry."""
    return OmniHTTPError(f"video {job.video.id} was deleted before it was started", HTTPStatus.GONE)


def _handler(raw_request: Request) -> ServingVideos:
    return get_handler(raw_request, "video")


router = APIRouter(lifespan=closing_store("video"))


@router.post("/v1/videos", responses=FORM_ERRORS, openapi_extra=VideoRequest.describe_body())
@model_route
async def create_video(request: Annotated[VideoRequest, Depends(VideoRequest.read)], raw_request: Request) -> Video:
    """Starts a video of a prompt, and of an image if there is one. Poll it until its status is completed."""
    return await _handler(raw_request).create(request, raw_request)


@router.post("/v1/videos/{video_id}/remix", responses=FORM_ERRORS)
@model_route
async def remix_video(video_id: VideoId, raw_request: Request, request: RemixRequest) -> Video:
    """Starts a video with the settings and the seed of one that is completed, and another prompt."""
    return await _handler(raw_request).remix(video_id, request.prompt, raw_request)


@router.get("/v1/videos", responses=FORM_ERRORS)
async def list_videos(
    raw_request: Request,
    after: Annotated[str | None, Query(description="Those that come after this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")] = "desc",
) -> VideoList:
    """All videos of this API key that the server has kept."""
    store = _handler(raw_request).store
    videos, has_more = store.page(RequestContext.of(raw_request).owner, after, limit, newest_first=order == "desc")
    first, last = (videos[0].id, videos[-1].id) if videos else (None, None)
    return VideoList(data=videos, first_id=first, last_id=last, has_more=has_more)


@router.get("/v1/videos/{video_id}", responses=FORM_ERRORS)
async def retrieve_video(video_id: VideoId, raw_request: Request) -> Video:
    """The state of a video."""
    return _handler(raw_request).store.get(video_id, RequestContext.of(raw_request).owner).video


@router.get(
    "/v1/videos/{video_id}/content",
    response_class=FileResponse,
    responses={
        **FORM_ERRORS,
        HTTPStatus.CONFLICT.value: {"model": ErrorResponse, "description": "It is not complete, or has failed."},
        HTTPStatus.OK.value: {"content": _FILE},
        HTTPStatus.PARTIAL_CONTENT.value: {"content": _FILE, "description": "The bytes of the header Range."},
    },
)
async def download_video(
    video_id: VideoId,
    raw_request: Request,
    variant: Annotated[str, Query(description="Only video: there are no thumbnails or sprite sheets.")] = "video",
) -> FileResponse:
    """The MP4 file of a video that is completed, or, with a header Range, a part of it."""
    if variant != "video":
        raise VLLMValidationError("there is only the variant 'video'", parameter="variant")
    path = _handler(raw_request).completed_job(video_id, raw_request).path
    return FileResponse(path, media_type="video/mp4", stat_result=path.stat())


@router.delete("/v1/videos/{video_id}", responses=FORM_ERRORS)
async def delete_video(video_id: VideoId, raw_request: Request) -> VideoDeleteResponse:
    """Removes a video; one that is not complete is aborted."""
    store = _handler(raw_request).store
    await store.delete(store.get(video_id, RequestContext.of(raw_request).owner))
    return VideoDeleteResponse(id=video_id, deleted=True, object="video.deleted")
