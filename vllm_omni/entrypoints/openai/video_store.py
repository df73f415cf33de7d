# SPDX-License-Identifier: Apache-2.0
"""Video jobs: the state of each, and the files of complete ones.

Limited in number, bytes and time, for each API key by itself, and in bytes for all keys. A video belongs to the key
that requested it; for other keys it does not exist.
Does not know how videos are made. For use from one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import openai.types
from pydantic import BaseModel, Field
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

from vllm_omni.entrypoints.openai.file_store import OwnedFiles, StoredFile, write_files
from vllm_omni.entrypoints.openai.request_context import end
from vllm_omni.entrypoints.openai.server_args import ServerLimits, flag
from vllm_omni.errors import PipelineFullError

_FULL_RETRY_S = 10.0


class VideoError(BaseModel):
    code: str
    message: str


class Video(openai.types.Video):
    """A video job, with any size and our errors."""

    object: Literal["video"] = "video"
    status: Literal["queued", "in_progress", "completed", "failed"] = "queued"
    progress: int = Field(default=0, description="Percent, by denoising steps.")
    prompt: str
    expires_at: int | None = Field(default=None, description="When the server removes it.")
    seconds: str = Field(description="Length; auto until it is known.")
    size: str = Field(description="WIDTHxHEIGHT; auto until it is known.")  # type: ignore[assignment]
    error: VideoError | None = None  # type: ignore[assignment]


@dataclass(eq=False, kw_only=True)
class VideoJob(StoredFile):
    """
    Attributes:
        video: Its state for its client.
        settings: Its settings besides the prompt.
        has_image: It starts from an image.
        inputs: The names of its other inputs.
        task: Makes the video.
    """

    video: Video
    settings: Mapping[str, Any]
    has_image: bool
    inputs: Sequence[str] = ()
    task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.video.id

    @property
    def has_ended(self) -> bool:
        return self.video.status in ("completed", "failed")


class VideoStore(OwnedFiles[VideoJob]):
    """All jobs, with their files. A job expires some time after it has ended."""

    def __init__(self, limits: ServerLimits) -> None:
        """Raises as the base."""
        super().__init__(
            limits,
            "videos",
            max_files=limits.max_stored_videos,
            max_bytes=limits.max_stored_video_bytes,
            max_total_bytes=limits.max_total_stored_video_bytes,
            keep_s=limits.video_expires_after_s,
        )

    def start(
        self,
        video: Video,
        make: Callable[[VideoJob], Coroutine[Any, Any, None]],
        *,
        owner: bytes,
        settings: Mapping[str, Any],
        has_image: bool,
        inputs: Sequence[str] = (),
    ) -> VideoJob:
        """Starts a job; `make` does the work, and is cancelled if the job is deleted.

        Raises:
            PipelineFullError: The owner has as many as are kept, and none of them has ended.
        """
        own = self._of(owner)
        if len(own) >= self._max_files:
            ended = next((job for job in own if job.has_ended), None)
            if ended is None:
                raise PipelineFullError(
                    f"{self._max_files} of your videos are being made ({flag('max_stored_videos')}); try again later",
                    _FULL_RETRY_S,
                )
            self._remove(ended)
        path = self._folder.path / f"{video.id}.mp4"
        job = VideoJob(video=video, owner=owner, settings=settings, has_image=has_image, inputs=inputs, path=path)
        self._files[video.id] = job
        job.task = asyncio.create_task(make(job), name=video.id)
        return job

    def get(self, video_id: str, owner: bytes) -> VideoJob:
        """
        Raises:
            VLLMNotFoundError: This owner has no video of this id, or it has expired.
        """
        job = self._files.get(video_id)
        if job is None or job.owner != owner:
            raise VLLMNotFoundError(f"there is no video {video_id!r}; it may have expired")
        return job

    def page(self, owner: bytes, after: str | None, limit: int, *, newest_first: bool) -> tuple[list[Video], bool]:
        """Up to `limit` videos of an owner, after the video `after`, and whether there are more.

        Raises:
            VLLMValidationError: The owner has no video `after`.
        """
        videos = [job.video for job in self._of(owner)]
        if newest_first:
            videos.reverse()
        start = 0
        if after is not None:
            ids = [video.id for video in videos]
            if after not in ids:
                raise VLLMValidationError(f"there is no video {after!r}", parameter="after")
            start = ids.index(after) + 1
        return videos[start : start + limit], start + limit < len(videos)

    async def complete(self, job: VideoJob, file: bytes) -> None:
        """Keeps the file of a job."""
        if len(file) > self._max_bytes:
            self.fail(job, "too_large", f"the video has {len(file)} bytes; the server keeps {self._max_bytes}")
            return
        await write_files({job.path: file})
        if not self._make_room(job.owner, len(file)):
            text = f"the server keeps {self._max_total_bytes} bytes of videos, which those of other clients take"
            self.fail(job, "no_room", f"{text}; try again later")
            return
        self._end(job)
        job.num_bytes = len(file)
        job.video.status, job.video.progress = "completed", 100

    def fail(self, job: VideoJob, code: str, message: str) -> None:
        """Keeps the error of a job."""
        job.path.unlink(missing_ok=True)
        self._end(job)
        job.video.status, job.video.error = "failed", VideoError(code=code, message=message)

    async def delete(self, job: VideoJob) -> None:
        """Aborts a job if it has not ended, and removes its file. Does nothing if it was removed before."""
        self._remove(job)
        if job.task is not None:
            await end(job.task)  # Which aborts its request.

    async def close(self) -> None:
        """Aborts all jobs and removes all files."""
        await asyncio.gather(*map(self.delete, list(self._files.values())))
        await super().close()

    def _end(self, job: VideoJob) -> None:
        now = time.time()
        job.video.completed_at, job.video.expires_at = int(now), int(now + self._keep_s)
        self._expire_later(job)
