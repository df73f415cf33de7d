# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a modular pipeline: its index and code, its workflows, and the inputs that each one needs.

Loads no weights. Refuses by name what an index names and is not there, and code that is not trusted.
"""

import dataclasses
import functools
import operator
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_origin

import diffusers
import msgspec
from diffusers import ModularPipeline, ModularPipelineBlocks, SchedulerMixin
from diffusers.models.autoencoders.vae import AutoencoderMixin
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.config.utils import nearest, split_error
from vllm_omni.diffusion.media_inputs import media_arguments, names_media, refuse_media
from vllm_omni.diffusion.modular import OUTPUTS, inputs_of, make_class, type_of
from vllm_omni.diffusion.pipeline_info import (
    INDEX,
    MODULAR_INDEX,
    OutputType,
    PipelineInfo,
    alternatives,
    has_file,
    load_model_index,
)
from vllm_omni.errors import StageConfigError

CODE_INDEX = "modular_config.json"
"""Names the module and class of blocks that are code of the checkpoint."""
_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError, AttributeError)
_SEVERAL_IMAGES = "image_conditioned"
"""The name of the workflow that reads images as references: one prompt can have several."""


@dataclasses.dataclass(frozen=True)
class ModularPipelineInfo(PipelineInfo):
    """One checkpoint of a modular pipeline.

    Attributes:
        pipe: It, without the components that are loaded.
    """

    pipe: ModularPipeline

    @classmethod
    def load(cls, model: str, config: DiTConfig) -> "ModularPipelineInfo":
        """
        Raises:
            StageConfigError: Its index or code cannot be used, it names what is not there, or makes no medium.
        """
        pipe = _make_pipe(model, config)
        for spec in _loaded_specs(pipe).values():
            if _lacks_files(spec):
                place = Path(str(spec.pretrained_model_name_or_path), spec.subfolder or "")
                raise StageConfigError(
                    f"{model}: {MODULAR_INDEX} names {place} for {spec.name}, which is not there; download the "
                    "checkpoint again"
                )
        try:
            pipeline_class = make_class(pipe)
        except ValueError as error:
            raise StageConfigError(f"{model}: {error}") from error
        info = cls(_index_of(pipe), pipeline_class, pipe)
        lacking = [
            spec.name
            for spec in info._basic_blocks.expected_components
            if spec.name in info._absent and _is_always_needed(spec)
        ]
        if lacking:
            raise StageConfigError(
                f"{model}: {pipeline_class.__name__} needs {', '.join(lacking)}, which {MODULAR_INDEX} does not name"
            )
        return info

    @property
    def specs(self) -> dict[str, ComponentSpec]:
        """The components that are loaded, by name."""
        return _loaded_specs(self.pipe)

    @cached_property
    def component_classes(self) -> dict[str, type]:
        """The class of each component, as far as known without loading it."""
        made = {name: type(value) for name, value in self.pipe.components.items() if value is not None}
        return {name: spec.type_hint for name, spec in self.specs.items() if spec.type_hint is not None} | made

    @property
    def output_type(self) -> OutputType:
        return OUTPUTS[self.pipeline_class.output_name]

    @property
    def needs_images(self) -> bool:
        return "image" in self._always_missing

    @property
    def missing_inputs(self) -> list[str]:
        return [name for name in self._always_missing if name not in self.media and names_media(self._types.get(name))]

    def needed_media(self, pipeline_class: type) -> list[str]:
        return [name for name in self._always_missing if name in self.media]

    def takes_several(self, pipeline_class: type, name: str = "image") -> bool:
        if name != "image":
            return "list[" in str(media_arguments(pipeline_class)[name])
        workflows = self.pipe._blocks._workflow_map
        return workflows is None or _SEVERAL_IMAGES in workflows

    def image_argument(self, pipeline_class: type, images: list[Any]) -> Any:
        return images[0] if len(images) == 1 else images

    def class_for(self, media: Collection[str]) -> type:
        for name in media:
            if name not in self.media:
                raise refuse_media(name, self.pipeline_class, self.media)
        return self.pipeline_class

    @property
    def _relatives(self) -> list[type]:
        return []

    @cached_property
    def _absent(self) -> set[str]:
        """Components that the checkpoint does not have."""
        return {name for name, value in self.pipe.components.items() if value is None} - {*self.specs}

    @cached_property
    def _types(self) -> dict[str, Any]:
        return {param.name: type_of(param) for param in inputs_of(self.pipe)}

    @cached_property
    def _basic_blocks(self) -> ModularPipelineBlocks:
        return self.blocks_for({"prompt": True})

    @cached_property
    def _always_missing(self) -> list[str]:
        """What a request needs beside its prompt."""
        return self.missing({"prompt": True})

    def blocks_for(self, given: Mapping[str, Any]) -> ModularPipelineBlocks:
        """The blocks that run with these inputs; media may be True."""
        blocks = self.pipe._blocks
        try:
            return blocks.get_execution_blocks(**given) or blocks
        except NotImplementedError:  # A single block.
            return blocks

    def missing(self, given: Mapping[str, Any]) -> list[str]:
        """The inputs that a call with these ones fails without. Takes the argument of `blocks_for`."""
        workflows = (self.pipe._blocks._workflow_map or {}).values()
        by_workflow = [{name for each in _as_tuple(inputs) for name in each} for inputs in workflows]
        for_all = set.intersection(*by_workflow) - {"prompt"} if by_workflow else set()
        missing = [name for name in sorted(for_all) if name not in given]
        blocks = self.blocks_for({**given, **dict.fromkeys(missing, True)})
        required = [param.name for param in blocks.inputs if param.required and param.default is None]
        return missing + [name for name in required if name not in given and name not in missing]

    def check_inputs(self, given: Mapping[str, Any]) -> None:
        """
        Args:
            given: The inputs of a request; media are True.

        Raises:
            ValueError: One is missing, or needs a component that the checkpoint does not have.
            TypeError: One has another type than the blocks declare.
        """
        name = self.pipeline_class.__name__
        for key, value in given.items():
            if value is not None and key not in self.media:
                _check_type(f"{name}: {key}", value, self._types.get(key))
        missing = self.missing(given)
        if missing:
            places = [f"{key} (in {'multi_modal_data' if key in self.media else 'extra_args'})" for key in missing]
            raise ValueError(f"{name} needs {' and '.join(places)} with {', '.join(given)}")
        basic = {spec.name for spec in self._basic_blocks.expected_components}
        needed = {spec.name for spec in self.blocks_for(given).expected_components} & self._absent - basic
        if needed:
            inputs, parts = ", ".join(key for key in given if key != "prompt"), " and ".join(sorted(needed))
            raise ValueError(f"{name}: {inputs}: this needs {parts}, which this checkpoint does not have")


def read_pipeline_info(model: str, config: DiTConfig) -> PipelineInfo:
    """A checkpoint's pipeline. A modular one runs it if it has no other one, or if the stage names one.

    Raises:
        StageConfigError: It cannot be read, or a diffusion stage cannot run it.
    """
    name = config.pipeline_class or load_model_index(model, config.revision)["_class_name"]
    has_no_other = not has_file(model, INDEX, config.revision) and has_file(model, MODULAR_INDEX, config.revision)
    if has_no_other or _find_modular_class(name) is not None:
        return ModularPipelineInfo.load(model, config)
    return PipelineInfo.load(model, config)


def _as_tuple(inputs: Any) -> tuple[Mapping[str, Any], ...]:
    """The inputs that choose a workflow: one set of them, or several."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _loaded_specs(pipe: ModularPipeline) -> dict[str, ComponentSpec]:
    specs = {name: pipe.get_component_spec(name) for name in pipe.pretrained_component_names}
    return {name: spec for name, spec in specs.items() if spec.pretrained_model_name_or_path and not _is_null(spec)}


def _is_null(spec: ComponentSpec) -> bool:
    """Whether an index has `[null, null]` for a component. Without a type its files may still say what it is."""
    return spec.type_hint is None and _lacks_files(spec)


def _lacks_files(spec: ComponentSpec) -> bool:
    """Whether a component's files should be on this machine and are not."""
    where = str(spec.pretrained_model_name_or_path)
    is_path = where.startswith(("/", ".", "~")) or where.count("/") > 1
    return (is_path or Path(where).exists()) and not Path(where, spec.subfolder or "").exists()


def _is_always_needed(spec: ComponentSpec) -> bool:
    cls = spec.type_hint
    is_denoiser = spec.name.startswith(("transformer", "unet"))
    return is_denoiser or (isinstance(cls, type) and issubclass(cls, (AutoencoderMixin, SchedulerMixin)))


def _index_of(pipe: ModularPipeline) -> dict[str, Any]:
    """Classes of components as a `model_index.json` has them, and the place of each."""
    return {
        name: [*_library_of(spec.type_hint), {"model": spec.pretrained_model_name_or_path, "subfolder": spec.subfolder}]
        for name, spec in _loaded_specs(pipe).items()
        if spec.type_hint is not None
    }


def _library_of(cls: type) -> tuple[str, str]:
    return cls.__module__.partition(".")[0], cls.__name__


# The checkpoint's files.


def _make_pipe(model: str, config: DiTConfig) -> ModularPipeline:
    index = _read_index(model, config)
    _check_entries(model, index)
    pipeline_class = _find_class(model, index, config)
    blocks = _load_own_blocks(model, config)
    known = getattr(diffusers, str(index.get("_blocks_class_name")), None)
    if blocks is None and index.get("_blocks_class_name") and known is None:
        raise StageConfigError(
            f"{model}: {MODULAR_INDEX}: diffusers {diffusers.__version__} has no blocks "
            f"{index['_blocks_class_name']!r}, and the checkpoint has no {CODE_INDEX} that names its own"
        )
    try:
        return pipeline_class(blocks=blocks, pretrained_model_name_or_path=model, revision=config.revision)
    except _ERRORS as error:
        raise StageConfigError(f"{model}: cannot be opened as {pipeline_class.__name__}: {error}") from error


def _read_index(model: str, config: DiTConfig) -> dict[str, Any]:
    """`modular_model_index.json`; empty where there is none."""
    if not has_file(model, MODULAR_INDEX, config.revision):
        return {}
    try:
        index = ModularPipeline.load_config(model, revision=config.revision)
    except (OSError, ValueError) as error:
        raise StageConfigError(f"{model}: {MODULAR_INDEX} cannot be read ({error})") from error
    if not isinstance(index, dict):
        raise StageConfigError(f"{model}: {MODULAR_INDEX} is no object; download the checkpoint again")
    return index


def _check_entries(model: str, index: Mapping[str, Any]) -> None:
    """Refuses a component whose class is unknown here, by its name."""
    for name, entry in index.items():
        if not isinstance(entry, list) or len(entry) != 3 or name.startswith("_"):
            continue
        if not isinstance(entry[2], dict) or not isinstance(entry[2].get("type_hint"), list):
            raise StageConfigError(f"{model}: {MODULAR_INDEX}: {name} has no type_hint; download the checkpoint again")
        try:
            ModularPipeline._dict_to_component_spec(name, entry[2])
        except _ERRORS as error:
            library, class_name = (*entry[2]["type_hint"], None, None)[:2]
            raise StageConfigError(
                f"{model}: {MODULAR_INDEX}: {name} is a {class_name}, which {library} does not have here ({error}); "
                "install a version that does"
            ) from error


def _find_class(model: str, index: Mapping[str, Any], config: DiTConfig) -> type[ModularPipeline]:
    name = config.pipeline_class or index.get("_class_name")
    if not name:
        raise StageConfigError(f"{model}: {MODULAR_INDEX} has no _class_name; it is no diffusers checkpoint")
    found = _find_modular_class(name)
    if found is None:
        known = [other for other in dir(diffusers) if other.endswith("ModularPipeline")]
        raise StageConfigError(
            f"{model}: diffusers {diffusers.__version__} has no modular pipeline {name!r}"
            f"{nearest(str(name), known)}; install a version that has it, or set engine_args.pipeline_class"
        )
    return found


def _find_modular_class(name: Any) -> type[ModularPipeline] | None:
    """The modular pipeline of diffusers with this name."""
    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, ModularPipeline) else None


def _load_own_blocks(model: str, config: DiTConfig) -> ModularPipelineBlocks | None:
    """Blocks that are code of the checkpoint, if it has any."""
    if not has_file(model, CODE_INDEX, config.revision):
        return None
    if not config.trust_remote_code:
        raise StageConfigError(
            f"{model}: its blocks are code of the checkpoint ({CODE_INDEX}); read it, and set "
            "engine_args.trust_remote_code: true (--trust-remote-code) to run it"
        )
    try:
        return ModularPipelineBlocks.from_pretrained(model, trust_remote_code=True, revision=config.revision)
    except Exception as error:  # The checkpoint's code may raise anything while it is imported.
        raise StageConfigError(f"{model}: its blocks cannot be imported: {error}") from error


# Types of inputs.


_PLAIN = (bool, int, float, str)


def _check_type(where: str, value: Any, declared: Any) -> None:
    kinds = [kind for kind in alternatives(declared) if not names_media(kind)]
    plain = [_plain_type(kind) for kind in kinds]
    if declared is not None and all(kind is type(None) for kind in kinds):
        raise TypeError(f"{where}: takes tensors, and a request has plain values")
    if None in plain:
        return
    try:
        msgspec.convert(value, functools.reduce(operator.or_, plain))
    except msgspec.ValidationError as error:
        problem, _ = split_error(error)
        raise TypeError(f"{where}: {problem}") from error
    except TypeError:  # Unions of several lists, which msgspec does not read.
        return


def _plain_type(declared: Any) -> Any:
    """A type as JSON has it, tuples as lists; None where values of it are not checked."""
    if declared in (*_PLAIN, type(None), list, dict):
        return declared
    origin, parts = get_origin(declared), [_plain_type(part) for part in get_args(declared) if part is not ...]
    if declared is tuple or (origin in (list, tuple) and None in parts):
        return list
    if origin in (list, tuple) and parts:
        return list[functools.reduce(operator.or_, parts)]  # type: ignore[misc]
    if origin is dict:
        return dict
    is_union = len(alternatives(declared)) > 1
    return functools.reduce(operator.or_, parts) if is_union and None not in parts else None
