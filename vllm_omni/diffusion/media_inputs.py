# SPDX-License-Identifier: Apache-2.0
"""Media arguments of a pipeline's call beside its prompt's images, by name: read in the caller, restored in the stage.

A pipeline's signature says which there are, and of which types. PIL images, uint8 arrays and arrays of frames become
PIL images, as users of diffusers pass them; other tensors and arrays are passed as they are, in the pipeline's format.
Knows no pipeline.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
import torch
from PIL import Image

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.utils import nearest
from vllm_omni.diffusion.input_images import as_hwc, as_uint8, check_pixels
from vllm_omni.diffusion.input_sounds import SoundFormat, read_sound
from vllm_omni.media import as_shown, to_pil
from vllm_omni.sampling_params import MediaInput

_MEDIA_TYPES = ("Image", "Tensor", "ndarray")
# Tensors of a pipeline's own making, settings that may be tensors, and what needs parts that are not loaded.
_NO_MEDIA = re.compile(
    r"prompt|callback|generator|hidden_states|attention_mask|ip_adapter|^hint_|^timesteps$|^sigmas$|^eta$|latents?(_|$)"
    r"|_(scale|rate|schedule|labels|cu_seqlens)$|^(class_labels|input_ids|guidance)"
)
_VISUAL = re.compile(r"image|mask|video|frame|hint|control")
_SOUND = re.compile(r"audio|sound|speech|waveform")
_WITHOUT_BATCH = ("src_audio", "reference_audio")
"""Sounds that a pipeline takes as `[channels, samples]`; all others are `[1, channels, samples]`."""
_DEPTH_OF_ROWS = 2
_PLAIN = (bool, int, float, str, type(None))
_MAX_DEPTH = 4


def call_parameters(pipeline_class: type) -> dict[str, inspect.Parameter]:
    """The named arguments of a pipeline's call."""
    return _named_parameters(pipeline_class.__call__)


@cache
def _named_parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(call, eval_str=True).parameters
    except (NameError, TypeError, AttributeError):  # An annotation that only type checkers can read.
        parameters = inspect.signature(call).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in parameters.items() if name != "self" and p.kind not in variable}


def media_arguments(pipeline_class: type) -> dict[str, Any]:
    """The media arguments of a pipeline's call, `image` among them, and their annotations."""
    return {
        name: parameter.annotation
        for name, parameter in call_parameters(pipeline_class).items()
        if not _NO_MEDIA.search(name) and (names_media(parameter.annotation) or dataclass_in(parameter.annotation))
    }


def names_media(annotation: Any) -> bool:
    """Whether a type is, or has in it, an image, an array or a tensor."""
    return any(name in str(annotation) for name in _MEDIA_TYPES)


def takes_frames(name: str, annotation: Any) -> bool:
    """Whether an argument is a video, or a list of one image for each of its frames."""
    text = str(annotation)
    is_list = "list[" in text.lower() and "Image" in text and "image" not in name
    return "video" in name or "frames" in name or is_list


def takes_images(name: str, annotation: Any) -> bool:
    """Whether PIL images can be passed. Many pipelines declare a tensor, and take them too."""
    is_visual = _VISUAL.search(name) and "embed" not in name and dataclass_in(annotation) is None
    return "Image" in str(annotation) or bool(is_visual)


def _takes_lists_only(name: str, annotation: Any) -> bool:
    """Whether a single picture has to be in a list, too."""
    members = [annotation] if get_origin(annotation) is list else get_args(annotation)
    are_lists = [get_origin(member) is list for member in members if member is not NoneType]
    return bool(are_lists) and all(are_lists) and not takes_frames(name, annotation)


def takes_sound(name: str, annotation: Any) -> bool:
    """Whether an argument is the samples of a sound."""
    is_array = "Tensor" in str(annotation) or "ndarray" in str(annotation)
    return is_array and bool(_SOUND.search(name)) and not takes_images(name, annotation)


def dataclass_in(annotation: Any, depth: int = 0) -> type | None:
    """The class of diffusers in a type whose fields have media."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation if any(names_media(field.type) for field in dataclasses.fields(annotation)) else None
    found = [dataclass_in(part, depth + 1) for part in get_args(annotation)] if depth < _MAX_DEPTH else []
    return next(filter(None, found), None)


def read_media(
    given: Mapping[str, Any], pipeline_class: type, config: DiTConfig, sound_format: SoundFormat | None = None
) -> dict[str, MediaInput]:
    """The values of media arguments as a request has them.

    Args:
        given: By name; see `MediaReader.read`.
        sound_format: Of the checkpoint; None: unknown.

    Raises:
        ValueError, TypeError: The pipeline does not take an argument, or its type; a picture is too large, or cannot be
            decoded.
    """
    known = media_arguments(pipeline_class)
    return {
        name: MediaReader(name, pipeline_class, config, sound_format).read(value, known[name])
        for name, value in given.items()
    }


def refuse_media(name: str, pipeline_class: type, known: Sequence[str]) -> ValueError:
    """The error of a request with an argument that the pipeline does not take, of `known` ones."""
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    return ValueError(f"{pipeline_class.__name__} takes no {name!r}{nearest(name, known)} ({takes})")


class MediaReader:
    """Reads one argument of a request."""

    def __init__(
        self, name: str, pipeline_class: type, config: DiTConfig, sound_format: SoundFormat | None = None
    ) -> None:
        self._name = name
        self._pipeline_class = pipeline_class
        self._config = config
        self._sound_format = sound_format
        self._num_pictures = 0

    def read(self, value: Any, annotation: Any, depth: int = 0) -> MediaInput:
        """
        Args:
            value: A PIL image; an array or tensor, uint8 `[height, width, channels]` or `[frames, ...]`, or anything
                that the pipeline reads; a list of these; rows of these, with None for one that the pipeline makes; a
                sound, `(waveform, samples per second)`; a dict with the fields of a dataclass.
            annotation: The argument's type.
            depth: How many lists it is in.
        """
        match value:
            case Image.Image() if depth == 0 and _takes_lists_only(self._name, annotation):
                return self.read([value], annotation)
            case Image.Image():
                return self._read_image(value, annotation)
            case np.ndarray() | torch.Tensor():
                return self._read_array(value, annotation)
            case (np.ndarray() | torch.Tensor(), int() | float()) if takes_sound(self._name, annotation):
                return self._read_sound(*value)
            case list() | tuple():
                return MediaInput(kind="items", items=[self.read(item, annotation, depth + 1) for item in value])
            case None if depth == _DEPTH_OF_ROWS:
                return MediaInput(kind="plain")
            case dict():
                return self._read_fields(value, annotation)
            case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
                return self._read_fields(vars(value), annotation)
        raise self._refusal(value, annotation)

    def _read_image(self, image: Image.Image, annotation: Any) -> MediaInput:
        self._check_is_taken(image, annotation)
        self._count(1, image.height, image.width)
        try:
            shown = as_shown(image)
        except ValueError as error:
            raise ValueError(f"{self._name} {error}") from error
        grey = shown.convert("L") if image.mode in ("1", "L") else shown  # Exactly the same values.
        pixels = torch.from_numpy(np.array(grey))
        return MediaInput(kind="image", tensor=pixels[..., None] if pixels.ndim == 2 else pixels)

    def _read_array(self, value: np.ndarray | torch.Tensor, annotation: Any) -> MediaInput:
        """Bytes, and arrays of frames, are pictures; anything else is the pipeline's own format."""
        is_bytes = value.dtype in (np.uint8, torch.uint8)
        if isinstance(value, torch.Tensor) and (value.is_meta or value.layout != torch.strided):
            raise TypeError(f"{self._name} is a tensor without plain values; give a dense one")
        if takes_images(self._name, annotation) and value.ndim == 4 and (is_bytes or isinstance(value, np.ndarray)):
            self._check_is_taken(value, annotation)
            return MediaInput(kind="frames", tensor=self._read_frames(value))
        if takes_images(self._name, annotation) and value.ndim in (2, 3) and is_bytes:
            pixels = as_hwc(value, self._name)
            self._count(1, *pixels.shape[:2])
            return MediaInput(kind="image", tensor=pixels.contiguous())
        if not any(name in str(annotation) for name in ("Tensor", "ndarray")):
            raise self._refusal(value, annotation)
        if value.ndim > 2 and _VISUAL.search(self._name):
            height, width = value.shape[-2:]
            check_pixels(height, width, self._config.max_pixels, self._name)
        is_array = isinstance(value, np.ndarray) and "ndarray" in str(annotation)
        try:
            tensor = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.detach().cpu()
        except TypeError as error:
            raise TypeError(f"{self._name}: {error}") from error
        return MediaInput(kind="array" if is_array else "tensor", tensor=tensor.contiguous())

    def _read_frames(self, value: np.ndarray | torch.Tensor) -> torch.Tensor:
        if value.shape[-1] not in (1, 3, 4) or not len(value):
            raise ValueError(
                f"{self._name} has shape {list(value.shape)}; frames are [frames, height, width, channels] with 1 or "
                "3 channels"
            )
        self._count(*value.shape[:3])
        return torch.stack([as_uint8(as_hwc(np.asarray(frame), self._name), self._name)[..., :3] for frame in value])

    def _read_sound(self, wave: np.ndarray | torch.Tensor, rate: float) -> MediaInput:
        if self._sound_format is None:
            raise ValueError(
                f"{self._name}: this checkpoint's rate of sounds is unknown; give a tensor in its pipeline's format"
            )
        samples = read_sound(wave, rate, self._sound_format, self._config.max_seconds, self._name)
        return MediaInput(kind="tensor", tensor=samples if self._name in _WITHOUT_BATCH else samples[None])

    def _read_fields(self, given: Mapping[str, Any], annotation: Any) -> MediaInput:
        declared = dataclass_in(annotation)
        if declared is None:
            raise self._refusal(given, annotation)
        fields = {field.name: field for field in dataclasses.fields(declared)}
        for name in given:
            if name not in fields:
                raise ValueError(
                    f"{self._name}: {declared.__name__} has no {name!r}{nearest(str(name), fields)} (it has "
                    f"{', '.join(fields)})"
                )
        missing = [
            name
            for name, field in fields.items()
            if name not in given and field.default is field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"{self._name}: {declared.__name__} needs {', '.join(missing)}")
        return MediaInput(kind="fields", fields={k: self._read_field(k, v, fields[k].type) for k, v in given.items()})

    def _read_field(self, name: str, value: Any, annotation: Any) -> MediaInput:
        if not isinstance(value, _PLAIN) or (names_media(annotation) and value is not None):
            return self.read(value, annotation)
        try:
            msgspec.convert(value, annotation)
        except msgspec.ValidationError as error:
            raise TypeError(f"{self._name}: {name}: {error}") from error
        except TypeError:
            pass  # A type that msgspec does not know.
        return MediaInput(kind="plain", plain=value)

    def _count(self, num_pictures: int, height: int, width: int) -> None:
        check_pixels(height, width, self._config.max_pixels, self._name)
        self._num_pictures += num_pictures
        if self._num_pictures > self._config.max_frames:
            raise ValueError(
                f"{self._name} has more than {self._config.max_frames} frames, which is this stage's limit (max_frames)"
            )

    def _check_is_taken(self, value: Any, annotation: Any) -> None:
        if not takes_images(self._name, annotation):
            raise self._refusal(value, annotation)

    def _refusal(self, value: Any, annotation: Any) -> TypeError:
        hint = "; open it first: PIL.Image.open(...)" if isinstance(value, (str, bytes)) else ""
        others = ", ".join(media_arguments(self._pipeline_class))
        sound = ", or (waveform, samples per second)" if takes_sound(self._name, annotation) else ""
        return TypeError(
            f"{self._name} is a {type(value).__name__}{hint}; {self._pipeline_class.__name__} takes "
            f"{_describe(annotation)}{sound} (its inputs: {others})"
        )


def _describe(annotation: Any) -> str:
    """A type in an error."""
    declared = dataclass_in(annotation)
    if declared is not None:
        return f"dicts with {', '.join(field.name for field in dataclasses.fields(declared))}"
    words = {"Image": "PIL images", "Tensor": "tensors", "ndarray": "arrays"}
    return " or ".join(word for name, word in words.items() if name in str(annotation))


def restore(value: MediaInput, annotation: Any) -> Any:
    """The argument of the pipeline's call, as `MediaReader.read` got it."""
    match value.kind:
        case "image":
            assert value.tensor is not None
            return to_pil(value.tensor)
        case "frames":
            assert value.tensor is not None
            return [to_pil(frame) for frame in value.tensor]
        case "array":
            assert value.tensor is not None
            return value.tensor.numpy()
        case "items":
            return [restore(item, annotation) for item in value.items]
        case "fields":
            declared = dataclass_in(annotation)
            assert declared is not None
            types = {field.name: field.type for field in dataclasses.fields(declared)}
            return declared(**{name: restore(field, types[name]) for name, field in value.fields.items()})
        case "plain":
            return value.plain
    return value.tensor
