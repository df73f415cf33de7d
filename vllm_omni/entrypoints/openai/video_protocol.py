# SPDX-License-Identifier: Apache-2.0
"""Requests and answers of the video endpoints: OpenAI's, and the settings that diffusion models have besides."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.image_protocol import DiffusionSettings, ImageUrls, Prompt


class VideoRequest(DiffusionSettings):
    """A request for a video."""

    seconds: float | None = Field(
        None,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="Length; the nearest that the model makes. Default: the model's own, or num_frames.",
        examples=["4"],
    )
    num_frames: int | None = Field(None, ge=1, description="Frames; in place of seconds.", examples=[81])
    fps: float | None = Field(None, gt=0, le=240, allow_inf_nan=False, description="Frames in a second.", examples=[16])
    input_reference: ImageUrls | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="A picture to start from: a file in a form; in JSON a data URI or an address (image_url).",
    )

    def settings(self) -> dict[str, Any]:
        given = super().settings()
        if given.get("num_outputs_per_prompt", 1) != 1:
            raise VLLMValidationError(
                "a request makes one video; send several", parameter="extra_body.num_outputs_per_prompt"
            )
        if self.seconds is not None and "num_frames" in given:
            raise VLLMValidationError("seconds and num_frames say the same; keep one of them", parameter="seconds")
        return {**given, "output_format": "mp4"}


class RemixRequest(BaseModel):
    """A request for a video like another one."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt


class VideoError(BaseModel):
    code: str
    message: str


class Video(BaseModel):
    """A video that is being made, or was."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"] = "queued"
    progress: int = Field(default=0, description="Percent, by denoising steps.")
    created_at: int = Field(description="Unix time, seconds.")
    completed_at: int | None = None
    expires_at: int | None = Field(default=None, description="When the server forgets it.")
    prompt: str
    remixed_from_video_id: str | None = None
    seconds: str = Field(description="Length; auto until it is known.")
    size: str = Field(description="WIDTHxHEIGHT; auto until it is known.")
    error: VideoError | None = None


class VideoList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True
