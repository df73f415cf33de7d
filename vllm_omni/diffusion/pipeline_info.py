# SPDX-License-Identifier: Apache-2.0
"""A diffusers checkpoint's pipeline class, its output type, the media that it takes, and its numbers of frames.

Reads `model_index.json`, configurations and the class's signature; loads no weights and builds no pipeline. Everything
comes from diffusers' own declarations, so that a pipeline of a later diffusers needs no change here.
"""

import dataclasses
import inspect
import sys
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from PIL import Image

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.loader import resolve_dotted_path
from vllm_omni.config.utils import nearest
from vllm_omni.diffusion.input_sounds import SoundFormat
from vllm_omni.diffusion.media_inputs import call_parameters, media_arguments, names_media, refuse_media
from vllm_omni.errors import StageConfigError

if TYPE_CHECKING:  # diffusers is imported when a diffusion pipeline is opened, not before
    from diffusers import DiffusionPipeline

OutputType = Literal["image", "video", "audio"]

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"
# Fields of diffusers' output classes, and their media.
_OUTPUT_FIELDS: dict[str, OutputType] = {"frames": "video", "audios": "audio"}
SOUND_FIELD = "audio"
"""The field of the sound of videos, beside `frames`."""
# By signature they take one tensor as `image`; in fact rows of images, with None for those that they make.
_ROWS_OF_IMAGES = ("VisualClozePipeline", "VisualClozeGenerationPipeline")
# By signature their image is optional; in fact they fail without one.
_NEEDS_IMAGES = ("QwenImageLayeredPipeline", *_ROWS_OF_IMAGES)
# Inputs that every pipeline fails without, also where they are optional by signature.
_ALWAYS_NEEDED = (
    "mask_image", "control_image", "control_mask", "control_video", "conditioning_frames", "original_image",
)  # fmt: skip
# Where a call has one of these, it does not need an image, too.
_IN_PLACE_OF_IMAGES = ("video", "conditions")
# By signature these are optional; in fact the pipeline fails without them.
_NEEDED_BY = {
    "ConsisIDPipeline": "id_cond", "StableAudio3AudioToAudioPipeline": "audio", "StableAudio3InpaintPipeline": "audio",
}  # fmt: skip
# In the names of components that consist of several networks, each of which reads an image of its own.
_SEVERAL_NETS = ("MultiControlNet", "MultiAdapter")
# Fields of the outputs of pipelines without a prompt that are no picture, video or sound.
_PICTURES = ("images", "frames", "audios", "prediction", "videos")
ANY_NUM_FRAMES = ("AllegroPipeline",)
"""Pipelines that decode more frames than a request has, and cut the video."""
# By signature they take one image for each prompt; in fact several for one prompt.
_SEVERAL_IMAGES = ("GlmImagePipeline", "QwenImageEditPlusPipeline", "QwenImage21Pipeline")


def is_diffusers_model(model: str, revision: str | None = None) -> bool:
    """Whether a checkpoint (a directory, or a name on the hub) is a diffusers pipeline. Imports no diffusers.

    True for a modular one, too. False for a name that cannot be looked up (offline, not cached): loading it raises the
    error.
    """
    return any(has_file(model, index, revision) for index in (INDEX, MODULAR_INDEX))


def has_file(model: str, name: str, revision: str | None) -> bool:
    """Whether a checkpoint has a file in its folder. Imports no diffusers."""
    if Path(model).exists():
        return (Path(model) / name).is_file()
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(model, name, revision=revision)
    except (OSError, ValueError):
        return False
    return True


@dataclasses.dataclass(frozen=True)
class PipelineInfo:
    """One diffusers checkpoint.

    Attributes:
        index: Its `model_index.json`.
        pipeline_class: The diffusers class that runs it.
    """

    index: dict[str, Any]
    pipeline_class: "type[DiffusionPipeline]"

    @classmethod
    def load(cls, model: str, config: DiTConfig) -> "PipelineInfo":
        """Reads a checkpoint of a pipeline that is not modular; `read_pipeline_info` reads any.

        Raises:
            StageConfigError: The checkpoint cannot be read, or its class is unknown, or makes text or what another
                pipeline reads.
        """
        index = load_model_index(model, config.revision)
        pipeline_class = _find_class(model, index, config)
        made = _output_fields(pipeline_class)
        if "prompt" not in call_parameters(pipeline_class) and not made & {*_PICTURES}:
            raise StageConfigError(
                f"{model}: {pipeline_class.__name__} takes no prompt and makes {', '.join(sorted(made)) or 'nothing'}; "
                "a diffusion stage makes images, videos and sound"
            )
        if hasattr(pipeline_class, "invert"):
            raise StageConfigError(
                f"{model}: {pipeline_class.__name__} needs a call of its `invert` before each of its own, and a stage "
                "makes one call for a request; use another pipeline"
            )
        if "texts" in made:
            raise StageConfigError(
                f"{model}: {pipeline_class.__name__} makes text; a diffusion stage makes images, videos and sound"
            )
        if made and all("embed" in field for field in made):
            raise StageConfigError(
                f"{model}: {pipeline_class.__name__} makes {', '.join(sorted(made))}, which another pipeline reads, "
                "and no image; use a checkpoint of a pipeline that runs both"
            )
        return cls(index, pipeline_class)

    @cached_property
    def output_type(self) -> OutputType:
        """The pipeline's output, by the output classes in its module."""
        fields = _output_fields(self.pipeline_class)
        if "num_frames" in call_parameters(self.pipeline_class):
            return "video"
        return next((made for field, made in _OUTPUT_FIELDS.items() if field in fields), "image")

    @property
    def takes_prompt(self) -> bool:
        """Whether a request has a prompt's text."""
        return "prompt" in call_parameters(self.pipeline_class)

    @property
    def needs_images(self) -> bool:
        """Whether a request must have an input image."""
        return _needs_image(self.pipeline_class)

    @property
    def takes_images(self) -> bool:
        """Whether a request can have input images."""
        return "image" in self.media

    @cached_property
    def media(self) -> list[str]:
        """The names of all media that a request can have, `image` first."""
        known = dict.fromkeys(
            name for each in (self.pipeline_class, *self._relatives) for name in media_arguments(each)
        )
        return sorted(known, key=lambda name: name != "image")

    def needed_media(self, pipeline_class: type) -> list[str]:
        """What a request for one of this checkpoint's classes must have: the call fails without it."""
        image = ["image"] if _needs_image(pipeline_class) else []
        return image + [name for name in _needed_media(pipeline_class) if name in media_arguments(pipeline_class)]

    @property
    def missing_inputs(self) -> list[str]:
        """What a call needs and no request can have: tensors that another pipeline makes."""
        known = media_arguments(self.pipeline_class)
        return [name for name in _needed_media(self.pipeline_class) if name not in known]

    def takes_several(self, pipeline_class: type, name: str = "image") -> bool:
        """Whether one prompt can have several images as this argument: by its type, or one for each of several nets."""
        if name == ("control_image" if "control_image" in call_parameters(pipeline_class) else "image"):
            classes = [entry[1] for entry in self.index.values() if isinstance(entry, list) and len(entry) == 2]
            if any(nets in str(each) for each in classes for nets in _SEVERAL_NETS):
                return True
        return takes_several_images(pipeline_class, name)

    def takes_rows(self, pipeline_class: type) -> bool:
        """Whether an `image` is rows of images, with None for those that the pipeline makes."""
        return pipeline_class.__name__ in _ROWS_OF_IMAGES

    def image_argument(self, pipeline_class: type, images: list[Any]) -> Any:
        """The images of one prompt as the pipeline's call takes them."""
        return images if self.takes_several(pipeline_class) else images[0]

    def check_inputs(self, given: Mapping[str, Any]) -> None:
        """Refuses inputs that do not go together, or have another type than the pipeline declares. Only modular
        pipelines declare enough for that."""

    def class_for(self, media: Collection[str]) -> "type[DiffusionPipeline]":
        """The class that runs a request with these media, made of the same components: the checkpoint's own, or
        diffusers' for images, for masks or for videos of the same model.

        Raises:
            ValueError: The model does not take one of them.
        """
        for pipeline_class in (self.pipeline_class, *self._relatives):
            if media_arguments(pipeline_class).keys() >= {*media}:
                return pipeline_class
        unknown = next((name for name in media if name not in self.media), None)
        if unknown is None:
            raise ValueError(
                f"no pipeline of {self.pipeline_class.__name__}'s model takes {' and '.join(media)} "
                "together; remove one of them"
            )
        raise refuse_media(unknown, self.pipeline_class, self.media)

    @cached_property
    def _relatives(self) -> "list[type[DiffusionPipeline]]":
        """Diffusers' classes for the same model that read images, masks or videos, and all of its components."""
        from diffusers.pipelines import auto_pipeline as auto

        parts = {
            name for name, entry in self.index.items() if isinstance(entry, list) and entry[:1] not in ([], [None])
        }
        found: list[Any] = []
        for maps in (
            (auto.AUTO_TEXT2IMAGE_PIPELINES_MAPPING, auto.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
             auto.AUTO_INPAINT_PIPELINES_MAPPING),
            (auto.AUTO_TEXT2VIDEO_PIPELINES_MAPPING, auto.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING,
             auto.AUTO_VIDEO2VIDEO_PIPELINES_MAPPING),
        ):  # fmt: skip
            names = {name for each in maps for name, known in each.items() if known is self.pipeline_class}
            found += [each[name] for each in maps[1:] for name in names if name in each]
        relatives = [each for each in dict.fromkeys(found) if each is not self.pipeline_class]
        return [each for each in relatives if parts <= {*inspect.signature(each.__init__).parameters}]


def _needs_image(pipeline_class: type) -> bool:
    parameter = call_parameters(pipeline_class).get("image")
    if parameter is None:
        return False
    if pipeline_class.__name__ in _NEEDS_IMAGES or "mask_image" in call_parameters(pipeline_class):
        return True
    if parameter.default is inspect.Parameter.empty:
        return True
    if not _is_optional(parameter.annotation):
        return not any(name in call_parameters(pipeline_class) for name in _IN_PLACE_OF_IMAGES)
    from diffusers.pipelines import auto_pipeline

    from_text = auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING.values()
    from_image = auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING.values()
    return pipeline_class in from_image and pipeline_class not in from_text


def _needed_media(pipeline_class: type) -> list[str]:
    """Images, videos and tensors beside `image` that a call fails without."""
    known = call_parameters(pipeline_class)
    needed = (*_ALWAYS_NEEDED, _NEEDED_BY.get(pipeline_class.__name__))
    return [
        name
        for name, parameter in known.items()
        if name in needed
        or (name == "video" and "image" not in known and not _is_optional(parameter.annotation))
        or (name not in ("prompt", "image") and _is_required_medium(parameter))
    ]


def _is_required_medium(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty and names_media(parameter.annotation)


def _output_fields(pipeline_class: type) -> set[str]:
    """The fields of the output classes in a pipeline's module."""
    from diffusers.utils import BaseOutput

    known: Iterable[Any] = vars(sys.modules[pipeline_class.__module__]).values()
    outputs = [name for name in known if inspect.isclass(name) and issubclass(name, BaseOutput)]
    # BaseOutput itself, which modules import, is no dataclass.
    return {f.name for output in outputs if dataclasses.is_dataclass(output) for f in dataclasses.fields(output)}


def takes_several_images(pipeline_class: type, name: str = "image") -> bool:
    """Whether one prompt can have several images as this argument.

    Most of diffusers' pipelines take a list for a batch of prompts; then an item can be an array or a tensor too.
    """
    if pipeline_class.__name__ in _SEVERAL_IMAGES and name == "image":
        return True
    if "prompt" not in call_parameters(pipeline_class):
        return False
    parameter = call_parameters(pipeline_class).get(name)
    lists = [] if parameter is None else [a for a in alternatives(parameter.annotation) if get_origin(a) is list]
    items = [item for a in lists for item in get_args(a)[:1]]
    of_any = any(get_origin(item) in (Union, types.UnionType) and "Image" in str(item) for item in items)
    of_images = bool(items) and all(item in (Image.Image, list[Image.Image]) for item in items)  # the lists of a batch
    return of_any or (of_images and Image.Image in items)


def load_model_index(model: str, revision: str | None = None) -> dict[str, Any]:
    """A checkpoint's `model_index.json`; `modular_model_index.json` where it has only that.

    Raises:
        StageConfigError: It cannot be read, or names no class.
    """
    from diffusers import DiffusionPipeline, ModularPipeline

    is_modular = not has_file(model, INDEX, revision) and has_file(model, MODULAR_INDEX, revision)
    reader, name = (ModularPipeline, MODULAR_INDEX) if is_modular else (DiffusionPipeline, INDEX)
    try:
        index = reader.load_config(model, revision=revision)
    except (OSError, ValueError) as error:
        raise StageConfigError(
            f"{model}: {name} cannot be read ({error}); give a folder of a saved diffusers pipeline, or a "
            "name on the hub (offline: one in the cache)"
        ) from error
    if not isinstance(index, dict) or not index.get("_class_name"):
        raise StageConfigError(f"{model}: {name} has no _class_name; it is no diffusers checkpoint")
    return index


def _find_class(model: str, index: dict[str, Any], config: DiTConfig) -> "type[DiffusionPipeline]":
    import diffusers

    name = config.pipeline_class or index["_class_name"]
    if not isinstance(name, str):  # [file, class]: code of the checkpoint
        return _load_own_class(model, name[0], name[1], config)
    if "." in name and not (config.pipeline_class or config.trust_remote_code):
        raise StageConfigError(
            f"{model}: {INDEX}: _class_name {name!r} is no class of diffusers; if you trust this module, set "
            "engine_args.pipeline_class to it, or engine_args.trust_remote_code: true"
        )
    found = resolve_dotted_path(name, f"{model}: pipeline_class") if "." in name else getattr(diffusers, name, None)
    if isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline):
        return found
    if found is not None and hasattr(found, "_backends"):
        needed = ", ".join(found._backends)
        raise StageConfigError(f"{model}: {name} needs packages of which some are not installed: {needed}")
    known = [other for other in dir(diffusers) if other.endswith("Pipeline")]
    raise StageConfigError(
        f"{model}: diffusers {diffusers.__version__} has no pipeline {name!r}{nearest(name, known)}; install a "
        "version that has it, or set engine_args.pipeline_class"
    )


def _load_own_class(model: str, module: str, name: str, config: DiTConfig) -> "type[DiffusionPipeline]":
    if not config.trust_remote_code:
        raise StageConfigError(
            f"{model}: its pipeline {name} is code of the checkpoint ({module}.py); read it, and set "
            "engine_args.trust_remote_code: true to run it"
        )
    from diffusers.utils.dynamic_modules_utils import get_class_from_dynamic_module

    try:
        return get_class_from_dynamic_module(
            model, f"{module}.py", class_name=name, revision=config.revision, trust_remote_code=True
        )
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise StageConfigError(f"{model}: its pipeline {name} cannot be imported from {module}.py: {error}") from error


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _is_optional(annotation: Any) -> bool:
    return type(None) in alternatives(annotation) or (isinstance(annotation, str) and "None" in annotation)


_TERMINAL = "shift_terminal"
_POSITIONS_OF_IMAGES = "pos_embed_seq_len"
VAE_CHANNELS = "input_channels"
"""The name that VAEs with transparency have for their number of channels."""
# VAEs' names for the frames of one latent frame.
_TEMPORAL_FACTORS = ("scale_factor_temporal", "temporal_compression_ratio")


def temporal_factor(model: str, index: dict[str, Any], revision: str | None = None) -> int:
    """Frames of one latent frame of a checkpoint's VAE, from its configuration; 1 where it has none,
    or where its pipeline makes any number of frames.

    Such a VAE makes a multiple of this number of frames, and one more.

    Args:
        index: The checkpoint's `model_index.json`.
    """
    if index.get("_class_name") in ANY_NUM_FRAMES:
        return 1
    values = _component_values("vae", _TEMPORAL_FACTORS, model, index, revision)
    return next((value for value in values if isinstance(value, int) and value > 0), 1)


def reads_last_image(model: str, index: dict[str, Any], revision: str | None = None) -> bool:
    """Whether a checkpoint's denoiser reads the embeddings of two images, of the first frame and the last: it has
    positions for both. Takes the arguments of `temporal_factor`."""
    return any(_component_values("transformer", (_POSITIONS_OF_IMAGES,), model, index, revision))


def sound_format(model: str, index: dict[str, Any], revision: str | None = None) -> SoundFormat | None:
    """What a checkpoint's VAE encodes of sound; None if it encodes none. Takes the arguments of `temporal_factor`."""
    values = _component_values("vae", ("sampling_rate", "audio_channels"), model, index, revision)
    return SoundFormat(*values) if len(values) == 2 and all(isinstance(value, int) for value in values) else None


def takes_alpha(model: str, index: dict[str, Any], revision: str | None = None) -> bool:
    """Whether a checkpoint's VAE encodes images with their transparency. Takes the arguments of `temporal_factor`."""
    return _component_values("vae", (VAE_CHANNELS,), model, index, revision) == [4]


def fewest_steps(model: str, index: dict[str, Any], revision: str | None = None) -> int:
    """The fewest steps of a denoising. Takes the arguments of `temporal_factor`.

    A scheduler with a terminal noise stretches its schedule from the first step to the last: it divides by zero if they
    are the same.
    """
    try:
        terminals = _component_values("scheduler", (_TERMINAL,), model, index, revision)
    except OSError:  # Its pipeline makes the scheduler.
        return 1
    return 2 if any(terminals) else 1


def _component_values(
    component: str, names: Sequence[str], model: str, index: dict[str, Any], revision: str | None
) -> list[Any]:
    """Settings of a component of a checkpoint: those of these names that its class has, if it is one of diffusers'."""
    import diffusers

    library, name, *place = index.get(component) or (None, None)
    if library != "diffusers" or not hasattr(diffusers, str(name)):
        return []
    component_class = getattr(diffusers, str(name))
    parameters = inspect.signature(component_class.__init__).parameters
    known = {name: parameters[name].default for name in names if name in parameters}
    if place:  # Of a modular pipeline.
        model, component = place[0]["model"], place[0]["subfolder"]
    config = component_class.load_config(model, subfolder=component, revision=revision) if known else {}
    return [config.get(name, default) for name, default in known.items()]


def nearest_num_frames(seconds: float, fps: float, factor: int) -> int:
    """The number of frames of a video of about this length that a VAE with this factor makes, at least 1."""
    return max(0, round((seconds * fps - 1) / factor)) * factor + 1


def check_num_frames(num_frames: int, factor: int) -> None:
    """
    Raises:
        ValueError: A VAE with this factor does not make this number of frames; names the nearest.
    """
    if (num_frames - 1) % factor:
        below = (num_frames - 1) // factor * factor + 1
        raise ValueError(
            f"num_frames {num_frames}: this model makes multiples of {factor}, and one more; the nearest are {below} "
            f"and {below + factor}"
        )


def check_size(pipeline_class: type, height: int, width: int) -> None:
    """Refuses a size by the pipeline class's own check, as far as that needs no loaded pipeline.

    Raises:
        ValueError: The pipeline does not make this height, or this width.
    """
    check = getattr(pipeline_class, "check_inputs", None)
    parameters = {} if check is None else inspect.signature(check).parameters
    if check is None or not {"height", "width"} <= parameters.keys():
        return
    required = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    unknown = dict.fromkeys(required[1:])
    try:
        check(object.__new__(pipeline_class), **{**unknown, "height": height, "width": width})
    except ValueError as error:
        if "height" in str(error):
            raise ValueError(f"size {width}x{height}: {error}") from error
    except (AttributeError, TypeError):
        pass  # What it reads of the loaded pipeline, or of the other arguments, it checks when it runs.
