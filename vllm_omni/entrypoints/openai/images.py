# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/generations and /v1/images/edits, as in OpenAI's API, for any pipeline that makes images."""

import asyncio
import io
import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse
from openai.types import Image as ImageFile
from openai.types import ImageEditStreamEvent, ImageGenStreamEvent, ImagesResponse
from openai.types.images_response import Usage
from PIL import Image, ImageChops
from pydantic import AliasChoices, Field, TypeAdapter, model_validator
from starlette.datastructures import State
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError

from vllm_omni.config.stage_config import OmniStageConfig
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.file_store import FILES_PATH, FileStore
from vllm_omni.entrypoints.openai.http_errors import FORM_ERRORS
from vllm_omni.entrypoints.openai.media_endpoint import DiffusionEndpoint, closing_store, completed_event, get_handler
from vllm_omni.entrypoints.openai.media_output import IMAGE_FORMATS, as_image_file, to_base64, usage_of
from vllm_omni.entrypoints.openai.media_request import (
    MAX_IMAGES,
    NO_EFFECT,
    ImageUrls,
    InputsRequest,
    MediaRequest,
)
from vllm_omni.entrypoints.openai.request_context import RequestContext, model_route, started
from vllm_omni.entrypoints.openai.server_args import ServerLimits, limits_from
from vllm_omni.entrypoints.openai.sse import MEDIA_TYPE, Line, comment_line, sse_line
from vllm_omni.events import CompletedEvent, ImageProgressEvent, OmniEvent
from vllm_omni.media import as_shown, encode_image
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.vllm_protocol import ErrorResponse

_IMAGE_RESPONSES: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {"model": ImagesResponse, "content": {MEDIA_TYPE: {}}},
    **FORM_ERRORS,
}
_URL_MODELS = ("dall-e-2", "dall-e-3")
"""OpenAI answers requests for these names with URLs, and clients that send them may read nothing else."""
_MASKS = ("mask_image", "mask")
"""What pipelines call a mask."""
_EVENT: TypeAdapter[ImageGenStreamEvent | ImageEditStreamEvent] = TypeAdapter(
    ImageGenStreamEvent | ImageEditStreamEvent
)


class ImageRequest(MediaRequest):
    """A request for new images."""

    n: int | None = Field(None, ge=1, le=10, description="Number of images; default 1.")
    response_format: Literal["b64_json", "url"] | None = Field(
        None,
        description="b64_json (default): images come in the answer, as base64. url (default of dall-e-2 and dall-e-3): "
        "the address of a file that the server keeps for a time; whoever knows it can download the image. Streamed "
        "images are always base64.",
    )
    output_format: Literal["png", "jpeg", "webp"] | None = Field(None, description="Default: png.")
    output_compression: int | None = Field(
        None, ge=0, le=100, description="Quality of jpeg and webp, as in OpenAI's API: 100 is the best. Default: 90."
    )
    stream: bool | None = Field(None, description="Server-sent events: previews, and each image as it is complete.")
    partial_images: int | None = Field(
        None, ge=0, le=3, description="Previews of each image, at most; only with stream. Each costs a small decode."
    )
    background: Literal["auto", "opaque"] | None = Field(None, description="Transparent ones are not supported.")
    quality: str | None = Field(None, description=f"{NO_EFFECT} See num_inference_steps.")
    complexity: str | None = Field(None, description=NO_EFFECT)
    style: str | None = Field(None, description=NO_EFFECT)
    moderation: str | None = Field(None, description=NO_EFFECT)

    @property
    def wants_urls(self) -> bool:
        if self.response_format is None:
            return self.model in _URL_MODELS
        return self.response_format == "url"

    def _openai_settings(self) -> list[tuple[str, Any, str]]:
        more: list[tuple[str, Any, str]] = []
        if self.n is not None:
            more.append(("num_outputs_per_prompt", self.n, "n"))
        if self.output_compression is not None:
            more.append(("output_quality", max(1, self.output_compression), "output_compression"))
        return super()._openai_settings() + more

    def settings(self) -> dict[str, Any]:
        if self.partial_images and not self.stream:
            raise VLLMValidationError("partial_images needs stream: true", parameter="partial_images")
        if self.output_compression is not None and self.output_format not in ("jpeg", "webp"):
            raise VLLMValidationError(
                "output_compression is for output_format jpeg or webp", parameter="output_compression"
            )
        return super().settings()


class ImageEditRequest(InputsRequest, ImageRequest):
    """A request for images that are made of others."""

    file_field, max_files, other_files, output_type = "image", MAX_IMAGES, ("mask",), "image"

    image: ImageUrls | None = Field(
        None,
        min_length=1,
        max_length=MAX_IMAGES,
        validation_alias=AliasChoices("image", "images"),
        description="The input image, or images: files in a form; in JSON data URIs or addresses. Required, unless the "
        "model's pipeline takes others only (inputs).",
    )
    mask: ImageUrls | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="An image of the same size, whose fully transparent pixels are where the first image is edited. A "
        "black and white mask is mask_image (inputs).",
    )
    input_fidelity: str | None = Field(None, description=f"{NO_EFFECT} See strength.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_markup(cls, fields: Any) -> Any:
        """A field of OpenAI's that would change the result, and that no model here supports."""
        if isinstance(fields, Mapping) and fields.get("markup") is not None:
            raise VLLMValidationError("this server's models take no markup; leave it out", parameter="markup")
        return fields

    @model_validator(mode="after")
    def _check_image(self) -> Self:
        if not self.image and (self.mask or not self.inputs):
            raise VLLMValidationError("image is missing", parameter="image")
        return self


class ServingImages(DiffusionEndpoint):
    """The handler of all endpoints.

    Attributes:
        store: Images that were answered as URLs.
    """

    kind = "image"

    def __init__(self, state: State, client: OmniEngineClient, stage: OmniStageConfig, args: Namespace) -> None:
        super().__init__(state, client, stage, args)
        self.store = FileStore(limits_from(args, ServerLimits))

    async def answer(self, request: ImageRequest, raw_request: Request) -> Response:
        """Raises `VLLMClientError` if the request is wrong, `OmniError` if it failed."""
        edit = request if isinstance(request, ImageEditRequest) else None
        urls = (edit and edit.image) or []
        self._check_input(bool(urls), bool(edit and edit.inputs))
        self.check_model(request.model)
        self.check_prompt(request.prompt)
        settings, file_format = self._settings(request)
        images = await self.media.images(urls, "image")
        inputs = {} if edit is None else await self._read_media(edit, images)
        events = self.generate(
            request.prompt,
            settings,
            images,
            raw_request,
            inputs=inputs,
            stream=bool(request.stream),
            priority=request.priority,
        )
        if not request.stream:
            output = (await completed_event(events)).outputs[0]
            files = await asyncio.to_thread(_files_of, output, file_format)
            kept = await self._keep(files, file_format, raw_request) if request.wants_urls else None
            body = await asyncio.to_thread(_render, files, kept, usage_of(output), file_format)
            return Response(body, media_type="application/json")
        kind = "image_generation" if edit is None else "image_edit"
        stream = _Stream(kind, file_format, self.expected_size(settings), request.partial_images or 0)
        return self.sse(stream.lines(await started(events)))

    async def _read_media(self, request: ImageEditRequest, images: Sequence[Image.Image]) -> dict[str, Any]:
        """The inputs of a request beside its images, its mask among them."""
        inputs = await self.read_inputs(request.inputs or {}, bool(images))
        takes = [] if self.info is None else self.info.media
        name = next((name for name in _MASKS if name in takes), None)
        if request.mask is None:
            # As at OpenAI: without a mask the image's own transparency is one, for a model that needs one.
            if name in self._needed and name not in inputs and images and images[0].has_transparency_data:
                inputs[str(name)] = _as_mask(images[0], images[0])
            return inputs
        if name is None:
            raise VLLMValidationError(
                "this server's model changes whole images and takes no mask; leave it out", parameter="mask"
            )
        if name in inputs:
            raise VLLMValidationError(f"mask and {name} set the same; keep one of them", parameter="mask")
        (mask,) = await self.media.images(request.mask, "mask")
        return {**inputs, name: _as_mask(mask, images[0])}

    @property
    def _needed(self) -> list[str]:
        return [] if self.info is None else self.info.needed_media(self.info.pipeline_class)

    def _check_input(self, has_images: bool, has_others: bool) -> None:
        # If other stages read the prompt, they make the input of the diffusers pipeline.
        if self.info is None or self.stage.engine_input_source:
            return
        if self._needed and not has_images and not has_others:
            raise VLLMValidationError(
                "this model makes images of images; send one to /v1/images/edits", parameter="model"
            )
        if has_images and not self.info.takes_images:
            raise VLLMValidationError(
                "this model takes no images; /v1/images/generations makes them of a prompt alone", parameter="image"
            )

    async def _keep(self, files: Sequence[bytes], file_format: str, raw_request: Request) -> list[str]:
        """The addresses of the files, under the address that the client has sent its request to."""
        names = await self.store.add(files, file_format, RequestContext.of(raw_request).owner)
        return [str(raw_request.url_for("download_image", name=name)) for name in names]

    def _settings(self, request: ImageRequest) -> tuple[dict[str, Any], str]:
        """The settings for the stage, and the format of the files."""
        settings = self.with_adapter(request.settings(), request.model)
        file_format = self.expected("output_format", settings)
        if "output_format" not in settings and file_format not in IMAGE_FORMATS:
            file_format = "png"
        if self.info is not None:
            settings["output_format"] = file_format  # The stage encodes files in a thread beside its other work.
        else:
            settings.pop("output_format", None)  # Any other stage makes pixels, which are encoded here.
        if request.partial_images:
            num_steps = self.expected("num_inference_steps", settings) or 1
            settings["preview_every"] = math.ceil(num_steps / (request.partial_images + 1))
        return settings, file_format


def _as_mask(mask: Image.Image, image: Image.Image) -> Image.Image:
    """OpenAI's mask as diffusers': white where the image is edited, which is where the mask is transparent.

    Raises:
        VLLMValidationError: It has no transparency, or another size than the image.
    """
    try:
        shown = as_shown(mask, keep_alpha=True)
    except ValueError as error:
        raise VLLMValidationError(f"mask {error}", parameter="mask") from error
    if shown.mode != "RGBA":
        raise VLLMValidationError(
            "mask has no transparent pixels, which are where the image is edited; send a black and white mask as "
            "mask_image",
            parameter="mask",
        )
    if mask.size != image.size:
        sizes = [f"{each.width}x{each.height}" for each in (mask, image)]
        raise VLLMValidationError(f"mask is {sizes[0]} and image is {sizes[1]}; they have one size", parameter="mask")
    return ImageChops.invert(shown.getchannel("A"))


class _Stream:
    """The server-sent events of one request."""

    def __init__(self, kind: str, file_format: str, size: str | None, num_previews: int) -> None:
        self._kind = kind
        self._file_format = file_format
        self._size = size or "auto"
        self._num_previews = num_previews
        self._num_sent: Counter[int] = Counter()

    async def lines(self, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[Line, None]:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ImageProgressEvent):
                    yield await self._progress(event)
                elif isinstance(event, CompletedEvent):
                    for line in await asyncio.to_thread(self._finish, event.outputs[0]):
                        yield line

    async def _progress(self, event: ImageProgressEvent) -> Line:
        num_sent = self._num_sent[event.index]
        if event.image is None or num_sent == self._num_previews:
            return comment_line(f"image {event.index}, step {event.step + 1} of {event.num_steps}")
        self._num_sent[event.index] += 1
        pixels = event.image.float() / 255
        file = await asyncio.to_thread(encode_image, pixels, self._file_format, 90)
        return self._event("partial_image", file, event.index, self._size, partial_image_index=num_sent)

    def _finish(self, output: OmniRequestOutput) -> list[Line]:
        usage = usage_of(output).model_dump(exclude_none=True)
        files = _files_of(output, self._file_format)
        return [self._event("completed", file, i, _size_of(file), usage=usage) for i, file in enumerate(files)]

    def _event(self, name: str, file: bytes, index: int, size: str, **more: Any) -> Line:
        """One of OpenAI's events, with `index`: which of the n images it belongs to."""
        fields = {
            "type": f"{self._kind}.{name}",
            "b64_json": to_base64(file),
            "created_at": int(time.time()),
            "size": size,
            "output_format": self._file_format,
            "background": "opaque",
            "quality": "auto",
            "index": index,
            **more,
        }
        event = _EVENT.validate_python(fields)
        return sse_line(event.model_dump(mode="json", exclude_none=True), event.type)


def _files_of(output: OmniRequestOutput, file_format: str) -> list[bytes]:
    """Takes long for large images."""
    return [as_image_file(image, file_format) for image in output.images]


def _render(files: Sequence[bytes], urls: Sequence[str] | None, usage: Usage, file_format: Any) -> bytes:
    """The body of an answer, with the URLs in place of the files if there are any. Takes long for large images."""
    answer = ImagesResponse(
        created=int(time.time()),
        data=[ImageFile(b64_json=to_base64(file)) for file in files]
        if urls is None
        else [ImageFile(url=url) for url in urls],
        background="opaque",
        output_format=file_format,
        size=_size_of(files[0]),
        usage=usage,
    )
    return answer.model_dump_json(exclude_none=True).encode()


def _size_of(file: bytes) -> str:
    with Image.open(io.BytesIO(file)) as image:
        return f"{image.width}x{image.height}"


router = APIRouter(lifespan=closing_store("image"))


@router.post("/v1/images/generations", responses=_IMAGE_RESPONSES)
@model_route
async def create_image(request: ImageRequest, raw_request: Request) -> Response:
    """Images that a prompt describes."""
    return await get_handler(raw_request, "image").answer(request, raw_request)


@router.post("/v1/images/edits", responses=_IMAGE_RESPONSES, openapi_extra=ImageEditRequest.describe_body())
@model_route
async def edit_image(
    request: Annotated[ImageEditRequest, Depends(ImageEditRequest.read)], raw_request: Request
) -> Response:
    """Images that are made of others, as a prompt says."""
    return await get_handler(raw_request, "image").answer(request, raw_request)


@router.get(
    FILES_PATH + "/{name}",
    response_class=FileResponse,
    responses={
        HTTPStatus.OK.value: {"content": {f"image/{file_format}": {} for file_format in IMAGE_FORMATS}},
        HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse},
    },
)
async def download_image(name: str, raw_request: Request) -> FileResponse:
    """An image that was answered as a URL. It needs no API key: whoever knows the name can download it."""
    handler = raw_request.app.state.omni_handlers.get("image")
    if handler is None:
        raise VLLMNotFoundError("this server keeps no images")
    path = handler.store.path(name)
    return FileResponse(
        path,
        media_type=f"image/{path.suffix.removeprefix('.')}",
        stat_result=path.stat(),
        headers={"Cache-Control": "private"},
    )
