# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/generations and /v1/images/edits, as OpenAI has them, for any pipeline that gives images."""

import asyncio
import io
import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from PIL import Image
from starlette.datastructures import State
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.exceptions import VLLMValidationError

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.http_errors import to_http_error
from vllm_omni.entrypoints.openai.image_protocol import (
    ImageEditRequest,
    ImageEvent,
    ImageFile,
    ImageRequest,
    ImagesResponse,
    ImageTokens,
    ImageUsage,
)
from vllm_omni.entrypoints.openai.media_inputs import ImageFetcher, form_description, read_request
from vllm_omni.entrypoints.openai.media_messages import IMAGE_FORMATS, as_image_file, to_base64
from vllm_omni.entrypoints.openai.media_stage import (
    MediaMaker,
    MediaStage,
    begun,
    completed,
    missing_media,
    new_id,
)
from vllm_omni.errors import OmniError
from vllm_omni.events import CompletedEvent, ImageProgressEvent, OmniEvent
from vllm_omni.media import encode_image
from vllm_omni.outputs import OmniRequestOutput

router = APIRouter()

_ERRORS = (
    HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT,
)  # fmt: skip
RESPONSES: dict[int | str, dict[str, Any]] = {status.value: {"model": ErrorResponse} for status in _ERRORS}
_STREAMED: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {"model": ImagesResponse, "content": {"text/event-stream": {}}}
}


class ServingImages:
    """Makes images of one pipeline."""

    def __init__(self, maker: MediaMaker, fetcher: ImageFetcher, keep_alive_s: float) -> None:
        """
        Args:
            keep_alive_s: A silent stream gets a comment after so many seconds; 0: none.
        """
        self._maker = maker
        self._fetcher = fetcher
        self._keep_alive_s = keep_alive_s

    async def generate(self, request: ImageRequest, raw_request: Request) -> Response:
        """
        Raises:
            VLLMClientError, OmniError: The request is wrong; it failed.
        """
        info = self._maker.stage.info
        if info is not None and not self._is_fed and info.needs_images:
            raise VLLMValidationError(
                "this model makes images of images; send one to /v1/images/edits", parameter="model"
            )
        return await self._answer(request, [], "image_generation", raw_request)

    async def edit(self, request: ImageEditRequest, raw_request: Request) -> Response:
        """As `generate`."""
        info = self._maker.stage.info
        if info is not None and not self._is_fed and not info.takes_images:
            raise VLLMValidationError(
                "this model takes no images; /v1/images/generations makes them of a prompt alone", parameter="image"
            )
        self._maker.check_model(request.model)
        self._maker.client.check_admission()  # Before pictures are fetched that nobody will look at.
        images = await self._fetcher.fetch(request.image, "image")
        return await self._answer(request, images, "image_edit", raw_request)

    @property
    def _is_fed(self) -> bool:
        """Other stages read the prompt, so that what the diffusers pipeline takes is not for the caller."""
        return bool(self._maker.stage.stage.engine_input_source)

    async def _answer(
        self, request: ImageRequest, images: Sequence[Image.Image], kind: str, raw_request: Request
    ) -> Response:
        self._maker.check_model(request.model)
        request.check()
        settings, file_format = self._settings(request)
        events = self._maker.events(
            request.prompt,
            settings,
            images,
            raw_request,
            request_id=new_id("image", raw_request),
            stream=bool(request.stream),
        )
        if not request.stream:
            body = await asyncio.to_thread(_render, await completed(events), file_format)
            return Response(body, media_type="application/json")
        stream = _Stream(kind, file_format, self._maker.stage.expected_size(settings), request.partial_images or 0)
        content = with_sse_keep_alive(stream.run(await begun(events)), self._keep_alive_s)
        return StreamingResponse(content, media_type="text/event-stream")

    def _settings(self, request: ImageRequest) -> tuple[dict[str, Any], str]:
        """What the stage is told, and the format of the files."""
        settings = self._maker.with_adapter(request.settings(), request.model)
        file_format = self._maker.stage.expected("output_format", settings)
        if "output_format" not in settings and file_format not in IMAGE_FORMATS:
            file_format = "png"
        if self._maker.stage.info is not None:
            settings["output_format"] = file_format  # The stage writes files beside its other work.
        if request.partial_images:
            num_steps = self._maker.stage.expected("num_inference_steps", settings) or 1
            settings["preview_every"] = math.ceil(num_steps / (request.partial_images + 1))
        return settings, file_format


class _Stream:
    """The events of one request, as server-sent events."""

    def __init__(self, kind: str, file_format: str, size: str | None, num_previews: int) -> None:
        self._kind = kind
        self._file_format = file_format
        self._size = size or "auto"
        self._num_previews = num_previews
        self._shown: Counter[int] = Counter()

    async def run(self, events: AsyncGenerator[OmniEvent, None]) -> AsyncGenerator[str, None]:
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, ImageProgressEvent):
                        yield await self._show_progress(event)
                    elif isinstance(event, CompletedEvent):
                        for text in await asyncio.to_thread(self._finish, event.outputs[0]):
                            yield text
        except OmniError as error:
            yield f"event: error\ndata: {create_error_response(to_http_error(error)).model_dump_json()}\n\n"

    async def _show_progress(self, event: ImageProgressEvent) -> str:
        shown = self._shown[event.index]
        if event.image is None or shown == self._num_previews:
            return f": image {event.index}, step {event.step + 1} of {event.num_steps}\n\n"
        self._shown[event.index] += 1
        pixels = event.image.float() / 255
        file = await asyncio.to_thread(encode_image, pixels, self._file_format, 90)
        return self._event("partial_image", file, event.index, self._size, partial_image_index=shown)

    def _finish(self, output: OmniRequestOutput) -> list[str]:
        usage = usage_of(output)
        files = [as_image_file(image, self._file_format) for image in output.images]
        return [self._event("completed", file, i, _size_of(file), usage=usage) for i, file in enumerate(files)]

    def _event(self, name: str, file: bytes, index: int, size: str, **more: Any) -> str:
        event = ImageEvent(
            type=f"{self._kind}.{name}",
            b64_json=to_base64(file),
            created_at=int(time.time()),
            size=size,
            output_format=self._file_format,
            index=index,
            **more,
        )
        return f"event: {event.type}\ndata: {event.model_dump_json(exclude_none=True)}\n\n"


def usage_of(output: OmniRequestOutput) -> ImageUsage:
    """Tokens that vLLM stages have read and written on the way to this output."""
    read = output.stage_metrics[0].num_input_tokens if output.stage_metrics else 0
    written = sum(stage.num_output_tokens for stage in output.stage_metrics)
    return ImageUsage(
        input_tokens=read,
        output_tokens=written,
        total_tokens=read + written,
        input_tokens_details=ImageTokens(text_tokens=read),
    )


def _render(output: OmniRequestOutput, file_format: str) -> bytes:
    """The body of an answer; takes its time where images are large."""
    files = [as_image_file(image, file_format) for image in output.images]
    answer = ImagesResponse(
        created=int(time.time()),
        data=[ImageFile(b64_json=to_base64(file)) for file in files],
        output_format=file_format,
        size=_size_of(files[0]),
        usage=usage_of(output),
    )
    return answer.model_dump_json().encode()


def _size_of(file: bytes) -> str:
    with Image.open(io.BytesIO(file)) as image:
        return f"{image.width}x{image.height}"


def _images(raw_request: Request) -> ServingImages:
    handler: ServingImages | None = raw_request.app.state.omni_images
    if handler is None:
        raise missing_media(raw_request.app.state.engine_client.config, "image")
    return handler


async def _edit_request(raw_request: Request) -> ImageEditRequest:
    return await read_request(raw_request, ImageEditRequest, "image")


@router.post(
    "/v1/images/generations", dependencies=[Depends(validate_json_request)], responses={**_STREAMED, **RESPONSES}
)
@with_cancellation
@load_aware_call
async def create_image(request: ImageRequest, raw_request: Request) -> Response:
    """Images that a prompt describes."""
    return await _images(raw_request).generate(request, raw_request)


@router.post(
    "/v1/images/edits",
    responses={**_STREAMED, **RESPONSES},
    openapi_extra=form_description(ImageEditRequest, "image", several=True),
)
@with_cancellation
@load_aware_call
async def edit_image(request: Annotated[ImageEditRequest, Depends(_edit_request)], raw_request: Request) -> Response:
    """Images that are made of others, as a prompt says."""
    return await _images(raw_request).edit(request, raw_request)


def attach_router(app: FastAPI) -> None:
    app.include_router(router)


def init_state(state: State, client: OmniEngineClient, args: Namespace) -> None:
    stage = MediaStage.find(client.config, "image", args.model)
    state.omni_images = stage and ServingImages(
        MediaMaker(client, state.openai_serving_models, stage), ImageFetcher(args), float(args.sse_keep_alive_interval)
    )
