# SPDX-License-Identifier: Apache-2.0
"""Requests with media: JSON or a form, the images and sounds that come with them, and the settings of diffusion models.

vLLM's media connector reads the media: uploads, data URIs and addresses alike, so that its rules and limits apply.
"""

import asyncio
import base64
import dataclasses
import mimetypes
import re
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

import msgspec
import numpy as np
import vllm.envs as envs
from fastapi import HTTPException, Request
from PIL import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.datastructures import UploadFile
from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaWithBytes

from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.json_body import JsonBody, validated, validator_of
from vllm_omni.entrypoints.openai.request_context import RequestContext
from vllm_omni.entrypoints.openai.stage_params import SETTINGS, diffusion_settings, without_nulls

MAX_IMAGES = 16
"""Of one request, as in OpenAI's API."""

MIN_VOICE_RANGE = 0.002
"""Of the samples of a recorded voice, from the lowest to the highest; all have 2."""

NO_EFFECT = "Accepted for OpenAI's clients; has no effect here."

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
_MAX_FIELDS = 100
_MAX_NAME = 100  # Characters of a client's word in an error.
_SIZE = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"

_INDEX = re.compile(r"\[[0-9]*\]$")
_INPUT = re.compile(r"^inputs\[(\w+)\]$")
_PART = re.compile(r"^(?:inputs\[(\w+)\]|(\w+))\[([0-9]{1,2})\]\[(\w+)\]$")
_ARGUMENT = re.compile(r"extra_args\[(\w+)\]$")
_HEADER = 256  # Characters of a data URI that have its type and its first bytes.
_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")


def as_urls(value: Any, field: str = "image_url") -> Any:
    """An image field as a list of addresses; pydantic refuses any other value.

    It has one address or a list; each is a string, or an object with it as `image_url` (a string, or an object with
    `url`). `detail` beside an address has no effect.
    """
    entries = value if isinstance(value, list) else [value]
    return [_as_url(entry, field) for entry in entries]


def _as_url(entry: Any, field: str) -> Any:
    for key in (field, "url"):
        if isinstance(entry, dict) and set(entry) - {"detail"} == {key}:
            entry = entry[key]
    return entry


def as_media_urls(value: Any) -> Any:
    """A field of any media as a list of addresses, or of objects with the fields of a dataclass; see `as_urls`."""
    return as_urls(as_urls(as_urls(value), "video_url"), "audio_url")


def _as_sound_url(value: Any) -> Any:
    """The address of one sound, which a form has in a list."""
    return _as_url(value[0] if isinstance(value, list) and len(value) == 1 else value, "audio_url")


def is_image(url: str) -> bool:
    """Whether an address or a data URI is that of a picture, by its type, its first bytes, or its name."""
    if url[:5].lower() != "data:":
        return (mimetypes.guess_type(urlsplit(url).path)[0] or "").startswith("image/")
    header, _, data = url[:_HEADER].partition(",")
    if not header[5:].lower().startswith("application/octet-stream"):
        return header[5:].lower().startswith("image/")
    try:
        first = base64.b64decode(data[: len(data) // 4 * 4])
    except ValueError:
        return False
    return first.startswith(_PICTURES) or (first[:4], first[8:12]) == (b"RIFF", b"WEBP")


ImageUrls = Annotated[list[str], BeforeValidator(lambda value: as_urls(value))]
"""Addresses or data URIs of images; also a single one, and objects with an `image_url`."""

MediaUrls = Annotated[
    list[str | dict[str, Any]], BeforeValidator(as_media_urls), Field(min_length=1, max_length=MAX_IMAGES)
]
"""The same of images, videos and sounds; also objects with the fields of a dataclass of the pipeline's."""

SoundUrl = Annotated[str, BeforeValidator(_as_sound_url), Field(min_length=1)]
"""The address or data URI of a sound; also an object with an `audio_url`."""

Prompt = Annotated[
    str, Field(min_length=1, max_length=32_000, description="Describes the result.", examples=["A hen."])
]

Priority = Annotated[
    int,
    Field(ge=-(2**63), lt=2**63, description="Lower values come first, in admission and in stages that order by it."),
]


class RequestModel(BaseModel):
    """A request whose fields may all be null, and whose body may be JSON or a form.

    Attributes:
        file_field: The field that may be an uploaded file, or several; in the request they are data URIs.
        max_files: Its files.
        other_files: Further fields that may be an uploaded file.
        output_type: Of the handler whose pipeline has `inputs`, see `MediaRequest`.
    """

    file_field: ClassVar[str] = ""
    max_files: ClassVar[int] = 1
    other_files: ClassVar[tuple[str, ...]] = ()
    output_type: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return without_nulls(fields) if isinstance(fields, Mapping) else fields

    @classmethod
    async def read(cls, raw_request: Request) -> Self:
        """Reads a body; a dependency of endpoints.

        Raises:
            RequestValidationError: A field is wrong.
            HTTPException: The body is of another type, or no valid form.
        """
        kind = raw_request.headers.get("content-type", "").partition(";")[0].strip().lower()
        inputs = cls._further_inputs(raw_request)
        if kind in _FORMS:
            fields = await _read_form(raw_request, {cls.file_field, *cls.other_files, *inputs})
            body = JsonBody(_gather(fields, inputs))
        elif kind == "application/json":
            body = RequestContext.of(raw_request).take_json() or JsonBody({})
            body = dataclasses.replace(body, value=_gather(body.value, inputs))
        else:
            raise HTTPException(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"send application/json or {_FORMS[0]}, not {kind[:_MAX_NAME] or 'nothing'}",
            )
        return await validated(validator_of(cls), body)

    @classmethod
    def _further_inputs(cls, raw_request: Request) -> set[str]:
        """Names of the pipeline's media that are no fields of the request."""
        handler = getattr(raw_request.app.state, "omni_handlers", {}).get(cls.output_type)
        info = getattr(handler, "info", None)
        return set() if info is None else {*info.media} - {*cls.model_fields}

    @classmethod
    def describe_body(cls) -> dict[str, Any]:
        """The body that `read` reads, in the API's description."""
        # Models of single fields are in the description already, by the endpoints that take JSON only.
        schema = cls.model_json_schema(ref_template="#/components/schemas/{model}")
        schema.pop("$defs", None)
        file = {"type": "string", "format": "binary"}
        uploaded = {"type": "array", "items": file, "maxItems": cls.max_files} if cls.max_files > 1 else file
        files = {cls.file_field: uploaded, **dict.fromkeys(cls.other_files, file)}
        form = {**schema, "properties": {**schema["properties"], **files}}
        content = {"application/json": {"schema": schema}, _FORMS[0]: {"schema": form}}
        return {"requestBody": {"required": True, "content": content}}


class MediaRequest(RequestModel):
    """The common fields of requests for images and videos. Defaults are those of the stage, or of the model."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt
    model: str | None = Field(None, description="A name that the model is served under; default: the first.")
    size: str | None = Field(
        None, pattern=_SIZE, description="WIDTHxHEIGHT in pixels, or auto: the model's own.", examples=["1024x1024"]
    )
    height: int | None = Field(None, ge=1, description="Pixels; in place of size.")
    width: int | None = Field(None, ge=1, description="Pixels; in place of size.")
    negative_prompt: str | None = Field(None, max_length=32_000, description="Describes what to avoid.")
    num_inference_steps: int | None = Field(None, ge=1, description="Denoising steps.", examples=[8])
    guidance_scale: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="How closely the prompt is followed, as the model was trained for."
    )
    true_cfg_scale: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="The same, by comparing with negative_prompt."
    )
    strength: float | None = Field(None, gt=0, le=1, description="How far an input image is changed.")
    seed: int | list[int] | None = Field(
        None,
        description="Of the first output, the next have seed + 1, ...; or one for each. 0 or more. Default: random.",
    )
    lora: str | None = Field(None, description="One of the server's LoRA adapters, see GET /v1/models.")
    lora_scale: float | None = Field(None, allow_inf_nan=False, description="Weight of the adapter. Default: 1.")
    extra_args: dict[str, Any] | None = Field(
        None, description="Further arguments of the model's diffusers pipeline, by its own names: plain values."
    )
    extra_body: dict[str, Any] | None = Field(
        None, description=f"More settings, or the same ones, as some clients send them: {', '.join(SETTINGS)}."
    )
    priority: Priority = 0
    user: str | None = Field(None, description=NO_EFFECT)
    safety_identifier: str | None = Field(None, description=NO_EFFECT)

    def settings(self) -> dict[str, Any]:
        """Fields of `DiffusionSamplingParams`, and `lora`.

        Raises:
            VLLMValidationError: A setting is unknown, wrong, or set to two values.
        """
        given = diffusion_settings(self.model_dump(exclude_none=True), adapters=True)
        for name, value, field in self._openai_settings():
            if given.setdefault(name, value) != value:
                raise VLLMValidationError(f"{field} and {name} set different values; keep one of them", parameter=name)
        return given

    def _openai_settings(self) -> list[tuple[str, Any, str]]:
        """What OpenAI's fields set: for each the setting, the value, and the field's name."""
        if self.size in (None, "auto"):
            return []
        width, height = map(int, str(self.size).split("x"))
        return [("width", width, "size"), ("height", height, "size")]


class MediaFetcher:
    """Fetches the media of requests, if the pipeline accepts a request now.

    Its methods take the request's field as `parameter`, for messages. They raise `OmniError` if the pipeline accepts no
    request, and `VLLMClientError` if something may not be fetched, does not exist, or is wrong.
    """

    def __init__(self, client: OmniEngineClient, args: Namespace) -> None:
        """
        Args:
            args: Those of `vllm serve`, whose rules vLLM's media connector applies.
        """
        self._client = client
        self._connector: MediaConnector = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            # Keeps transparency, which some models read, and all frames of a video.
            media_io_kwargs={"image": {"image_mode": None}, "video": {"num_frames": -1}},
            allowed_local_media_path=args.allowed_local_media_path,
            allowed_media_domains=args.allowed_media_domains,
        )

    async def images(self, urls: Sequence[str], parameter: str) -> list[Image.Image]:
        """The images at up to `MAX_IMAGES` addresses, or in data URIs."""
        self._client.check_admission()
        if len(urls) > MAX_IMAGES:
            raise VLLMValidationError(f"{len(urls)} images; a request takes at most {MAX_IMAGES}", parameter=parameter)
        images = [await self._image(url, parameter) for url in urls]
        return [image.media if isinstance(image, MediaWithBytes) else image for image in images]

    async def video(self, url: str, parameter: str) -> np.ndarray:
        """The frames of the video at an address, or in a data URI: uint8 `[frames, height, width, 3]`."""
        self._client.check_admission()
        try:
            video = await self._connector.fetch_video_async(url)
        except (VLLMValidationError, VLLMUnprocessableEntityError) as error:
            error.parameter = parameter
            raise
        frames, _ = video.media if isinstance(video, MediaWithBytes) else video
        return frames

    async def image_file(self, url: str, parameter: str) -> bytes | None:
        """The file of one image, which can be read; None if a connector that is not ours has not kept it."""
        self._client.check_admission()
        image = await self._image(url, parameter)
        return image.original_bytes if isinstance(image, MediaWithBytes) else None

    async def _image(self, url: str, parameter: str) -> Any:
        try:
            return await self._connector.fetch_image_async(url)  # vLLM declares an `Image` only.
        except VLLMClientError:
            raise
        except (ValueError, NotImplementedError, Image.DecompressionBombError) as error:
            raise VLLMValidationError(f"{parameter}: {error}", parameter=parameter) from error

    async def sound(self, url: str, parameter: str) -> tuple[np.ndarray, float]:
        """The sound at an address, or in a data URI: float32 `[samples]` in [-1, 1], channels averaged, and its samples
        per second."""
        self._client.check_admission()
        try:
            return await self._connector.fetch_audio_async(url)
        except (VLLMValidationError, VLLMUnprocessableEntityError) as error:
            error.parameter = parameter
            raise

    async def voice(self, url: str, parameter: str) -> tuple[np.ndarray, float]:
        """A `sound` that is to be imitated; silence has no voice, nor has an offset."""
        samples, sample_rate = await self.sound(url, parameter)
        if np.ptp(samples) < MIN_VOICE_RANGE:
            raise VLLMValidationError(
                "the recording is silent; record a voice, or raise its volume", parameter=parameter
            )
        return samples, sample_rate


class InputsRequest(MediaRequest):
    """A request that may have further media of the pipeline, by its own names."""

    prompt: Prompt = ""
    inputs: dict[str, MediaUrls] | None = Field(
        None,
        max_length=MAX_IMAGES,
        description="Further media of the model's pipeline, by its own names (control_image, video, last_image, audio, "
        "...): data URIs or addresses; of one that takes objects (conditions) those, with addresses in them. Each may "
        "also be a field, or a file in a form.",
    )


def _gather(fields: Any, names: Collection[str]) -> Any:
    """The fields of a request with those of these names in `inputs`."""
    found = {name: fields[name] for name in names if name in fields} if isinstance(fields, Mapping) else {}
    if not found:
        return fields
    given = fields.get("inputs") or {}
    if not isinstance(given, Mapping) or given.keys() & found.keys():
        raise VLLMValidationError(f"inputs and {min(found)} set the same; keep one of them", parameter="inputs")
    return {**{key: value for key, value in fields.items() if key not in found}, "inputs": {**given, **found}}


async def _read_form(request: Request, file_fields: Collection[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    parts: dict[str, dict[int, dict[str, Any]]] = {}  # of objects, by field and number
    async with request.form(max_files=MAX_IMAGES + 1, max_fields=_MAX_FIELDS) as form:
        for key, value in form.multi_items():
            # Clients write a list as `image[]` or `image[0]`, and a field of an object as `input_reference[image_url]`
            # or `inputs[control_image]`.
            name = _INDEX.sub("", key).removesuffix("[image_url]").removesuffix("[audio_url]")
            name = _INPUT.sub(r"\1", name)
            if value == "" or (isinstance(value, UploadFile) and not value.filename and not value.size):
                continue  # A page sends its unfilled fields, too.
            if (argument := _ARGUMENT.match(key)) and isinstance(value, str):
                fields.setdefault("extra_args", {})[argument[1]] = _as_json(value)
            elif key == "extra_args" and isinstance(value, str):
                fields.setdefault("extra_args", _as_json(value))
            elif (part := _PART.match(key)) and (name := part[1] or part[2]) in file_fields:
                parts.setdefault(name, {}).setdefault(int(part[3]), {})[part[4]] = await _as_plain(value, key)
            elif name in file_fields:
                medium = await _as_data_uri(value, name)
                fields.setdefault(name, []).extend(medium if isinstance(medium, list) else [medium])
            elif key in fields and key.endswith("[]"):
                fields[key] = [*(fields[key] if isinstance(fields[key], list) else [fields[key]]), value]
            elif key in fields:
                raise VLLMValidationError(f"{key} is given more than once", parameter=key)
            else:
                fields[key] = value  # The model refuses a file here: it takes strings only.
    for name, by_number in parts.items():
        fields.setdefault(name, []).extend(by_number[number] for number in sorted(by_number))
    return fields


def _as_json(value: str) -> Any:
    """A number, a list, ... that a form has as text; any other text as it is."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value


async def _as_plain(value: UploadFile | str, name: str) -> Any:
    """A field of an object in a form: a file as a data URI, an address, or a plain value."""
    is_plain = isinstance(value, str) and not _ADDRESS.match(value)
    return _as_json(str(value)) if is_plain else await _as_data_uri(value, name)


async def _as_data_uri(value: UploadFile | str, name: str) -> Any:
    """A file as a data URI; an address; objects, which a form has as JSON."""
    if isinstance(value, str):
        if value.lstrip().startswith(("{", "[")):
            return _as_json(value)
        if not _ADDRESS.match(value):
            raise VLLMValidationError(
                f"{name} is neither a file nor an address nor a data URI; a file needs a name (with curl: "
                f"-F {name}=@FILE)",
                parameter=name,
            )
        return value
    data = await value.read()
    encoded = await asyncio.to_thread(base64.b64encode, data)
    return f"data:application/octet-stream;base64,{encoded.decode()}"
