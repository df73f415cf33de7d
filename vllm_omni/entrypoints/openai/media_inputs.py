# SPDX-License-Identifier: Apache-2.0
"""Pictures that come with a request: as an upload in a form, as a data URI, or at an address that may be fetched.

All are read by vLLM's media connector, whose allow lists and limits hold for each of them alike.
"""

import asyncio
import base64
from argparse import Namespace
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import vllm.envs as envs
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from PIL import Image
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaWithBytes

MAX_IMAGES = 16
"""Of one request, as OpenAI's API has it."""

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
_MAX_FIELDS = 100

_Model = TypeVar("_Model", bound=BaseModel)


class ImageFetcher:
    """Reads pictures; keeps their transparency, which some models look at."""

    def __init__(self, args: Namespace) -> None:
        """
        Args:
            args: Of `vllm serve`: what may be fetched.
        """
        self._connector = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            media_io_kwargs={"image": {"image_mode": None}},
            allowed_local_media_path=args.allowed_local_media_path,
            allowed_media_domains=args.allowed_media_domains,
        )

    async def fetch(self, urls: Sequence[str], parameter: str) -> list[Image.Image]:
        """The pictures at these addresses, or in these data URIs.

        Args:
            parameter: The request's field, for messages.

        Raises:
            VLLMClientError: There are too many, or one may not be fetched, is not there, or is none.
        """
        if len(urls) > MAX_IMAGES:
            raise VLLMValidationError(f"{len(urls)} images; a request takes at most {MAX_IMAGES}", parameter=parameter)
        return [await self._fetch(url, parameter) for url in urls]

    async def _fetch(self, url: str, parameter: str) -> Image.Image:
        try:
            image = await self._connector.fetch_image_async(url)
        except VLLMClientError:
            raise
        except (ValueError, NotImplementedError, Image.DecompressionBombError) as error:
            raise VLLMValidationError(f"{parameter}: {error}", parameter=parameter) from error
        return image.media if isinstance(image, MediaWithBytes) else image


async def read_request(request: Request, model: type[_Model], image_field: str) -> _Model:
    """The body of a request that may be JSON or a form.

    Args:
        image_field: The field whose values may be uploaded files; in the result they are data URIs.

    Raises:
        RequestValidationError: The model does not take it.
        HTTPException: It is something else, or no valid form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _FORMS:
        fields = await _read_form(request, image_field)
    elif kind == "application/json":
        fields = await request.json()
    else:
        raise HTTPException(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send application/json or {_FORMS[0]}, not {kind or 'nothing'}"
        )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**found, "loc": ("body", *found["loc"])} for found in errors]) from error


def form_description(model: type[BaseModel], image_field: str, *, several: bool) -> dict[str, Any]:
    """What `read_request` takes, for the OpenAPI description of an endpoint."""
    schema = model.model_json_schema()
    file = {"type": "string", "format": "binary"}
    uploaded = {"type": "array", "items": file, "maxItems": MAX_IMAGES} if several else file
    form = {**schema, "properties": {**schema["properties"], image_field: uploaded}}
    content = {"application/json": {"schema": schema}, _FORMS[0]: {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


async def _read_form(request: Request, image_field: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    async with request.form(max_files=MAX_IMAGES + 1, max_fields=_MAX_FIELDS) as form:
        for key, value in form.multi_items():
            # Clients write a list as `image[]`, and what is in an object as `input_reference[image_url]`.
            name = key.removesuffix("[]").removesuffix("[image_url]")
            if name == image_field:
                fields.setdefault(name, []).append(await _as_url(value))
            elif key in fields:
                raise VLLMValidationError(f"{key} is given more than once", parameter=key)
            else:
                fields[key] = value  # A file here is refused by the model: it takes texts only.
    return fields


async def _as_url(value: UploadFile | str) -> str:
    if isinstance(value, str):
        return value
    data = await value.read()
    encoded = await asyncio.to_thread(base64.b64encode, data)
    return f"data:application/octet-stream;base64,{encoded.decode()}"


def as_urls(value: Any) -> Any:
    """What stands for pictures in JSON, or in a form, as a list of addresses; anything else is for pydantic to refuse.

    One or a list of them; each a text, or an object with it as `image_url` (which may be an object with `url`).
    """
    entries = value if isinstance(value, list) else [value]
    return [_as_text(entry) for entry in entries]


def _as_text(entry: Any) -> Any:
    for key in ("image_url", "url"):
        if isinstance(entry, dict) and set(entry) == {key}:
            entry = entry[key]
    return entry
