# SPDX-License-Identifier: Apache-2.0
"""Modular pipelines of diffusers, as pipelines of one class with one call: the stage runs them like all others.

Their blocks declare inputs and outputs. A class is made of them for each checkpoint (`make_class`): its `__call__` has
the blocks' inputs as its signature and returns what pipelines return. Which blocks run, diffusers chooses by the inputs
of a call (its workflows). Knows no pipeline by name, and no files.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from diffusers import ModularPipeline, ModularPipelineBlocks
from diffusers.guiders import BaseGuidance
from diffusers.models.cache_utils import CacheMixin
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks, PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import INPUT_PARAM_TEMPLATES, InputParam
from diffusers.pipelines import auto_pipeline
from diffusers.utils import BaseOutput
from PIL import Image

from vllm_omni.diffusion.pipeline_info import OutputType

OUTPUTS: dict[str, OutputType] = {
    "videos": "video", "video": "video", "frames": "video", "images": "image", "image": "image", "audios": "audio",
    "audio": "audio",
}  # fmt: skip
"""Names of blocks' outputs that are media; the first one of a pipeline is what it makes."""
_SOUNDS = ("audio", "sound")
_DECODE = "decode"
"""The name of the block that decodes latents."""
# Of inputs that declare no type and of which diffusers has no template.
_UNTYPED = {"video": list[Image.Image], "mask": list[Image.Image]}


@dataclasses.dataclass
class ModularOutput(BaseOutput):
    """What one call makes.

    Attributes:
        output: Images, videos or sounds, as pipelines of diffusers return them; or latents.
        audio: The sound of videos, if the pipeline makes both.
    """

    output: Any
    audio: Any = None


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a denoising.

    Attributes:
        num_steps: How many the denoising has.
        before, after: The latents before and after it; None where the loop has none.
    """

    num_steps: int
    before: torch.Tensor | None
    after: torch.Tensor | None


class ModularCall:
    """The first base of the class of a checkpoint; the second is its class of diffusers.

    Attributes:
        output_name, sound_name: Names of the blocks' outputs.
        guidance: Argument of the call -> the guider whose scale it sets.
        names_passes: Whether a block tells a denoiser's cache which of the guided passes of a step it computes.
        on_value: Called with the name and value of each input and result of a block, before the next block runs.
        on_step: Called after each step of a loop of blocks.
    """

    output_name: str
    sound_name: str | None
    guidance: Mapping[str, str]
    names_passes: bool
    on_value: Callable[[str, Any], None]
    on_step: Callable[[Step], None]
    _exclude_from_cpu_offload: Collection[str] = ()
    _blocks: ModularPipelineBlocks

    def run(self, inputs: Mapping[str, Any]) -> ModularOutput:
        """One call, on a copy of the pipeline that has its own blocks, scheduler and guiders.

        Raises:
            ValueError: Latents are wanted, and no block decodes them.
        """
        given = {name: value for name, value in inputs.items() if value is not None}
        for name, guider in self.guidance.items():
            if name in given:
                setattr(self, guider, _with_scale(getattr(self, guider), given.pop(name)))
        wants_latents = given.get("output_type") == "latent"
        if wants_latents:
            del given["output_type"]
            self._leave_out_decoding()
        for block in _leaves(self._blocks):
            if isinstance(block, LoopSequentialPipelineBlocks):
                _watch_steps(block, self.on_step)
        try:
            state = super().__call__(state=_WatchedState(self.on_value), **given)  # type: ignore[misc]
        finally:
            self.maybe_free_model_hooks()
        if wants_latents:
            return ModularOutput(state.get("latents"))
        sound = None if self.sound_name is None else state.get(self.sound_name)
        return ModularOutput(state.get(self.output_name), sound)

    def maybe_free_model_hooks(self) -> None:
        """Clears what a denoiser's cache holds of a call. Other pipelines of diffusers do this at their end."""
        for component in vars(self).values():
            if isinstance(component, CacheMixin) and component.is_cache_enabled:
                component._reset_stateful_cache()

    def set_progress_bar_config(self, **settings: Any) -> None:
        """Sets that of all blocks, also of blocks in blocks."""
        for block in _leaves(self._blocks):
            if hasattr(block, "set_progress_bar_config"):
                block.set_progress_bar_config(**settings)

    def _leave_out_decoding(self) -> None:
        names = list(self._blocks.sub_blocks)
        if _DECODE not in names:
            raise ValueError(f"{type(self).__name__} has no latents as output: none of its blocks is named {_DECODE!r}")
        for name in names[names.index(_DECODE) :]:
            del self._blocks.sub_blocks[name]


def _with_scale(guider: BaseGuidance, scale: float) -> BaseGuidance:
    """The guider with another scale. Those of distilled models are switched off, until a request wants guidance."""
    return guider.new(guidance_scale=scale, **({"enabled": True} if "enabled" in guider.config else {}))


class _WatchedState(PipelineState):
    """Values of one call, which reports each one."""

    def __init__(self, on_value: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._on_value = on_value

    def __deepcopy__(self, memo: Any) -> "_WatchedState":
        return self  # It is new; diffusers copies it for callers who use theirs again.

    def set(self, key: str, value: Any, kwargs_type: str | None = None) -> None:
        super().set(key, value, kwargs_type)
        self._on_value(key, value)


def _watch_steps(block: Any, on_step: Callable[[Step], None]) -> None:
    loop_step = block.loop_step

    def watched(components: Any, state: Any, **place: Any) -> Any:
        before = getattr(state, "latents", None)
        result = loop_step(components, state, **place)
        counts = [_length(getattr(state, name, None)) for name in ("timesteps", "sigmas")]
        counts.insert(1, getattr(state, "num_inference_steps", None) or 0)
        on_step(Step(next(filter(None, counts), 0), before, getattr(state, "latents", None)))
        return result

    block.loop_step = watched


def _length(values: Any) -> int:
    return len(values) if hasattr(values, "__len__") else 0


def _leaves(block: Any) -> list[Any]:
    """All blocks in a block that are run, loops as one."""
    if not block.sub_blocks or isinstance(block, LoopSequentialPipelineBlocks):
        return [block]
    return [leaf for inner in block.sub_blocks.values() for leaf in _leaves(inner)]


def make_class(pipe: ModularPipeline) -> type:
    """The class of a checkpoint's pipeline.

    Args:
        pipe: It, also without the components that are loaded.

    Raises:
        ValueError: It makes no medium.
    """
    base = type(pipe)
    outputs = [output.name for output in pipe._blocks.outputs]
    made = next((name for name in OUTPUTS if name in outputs), None)
    if made is None:
        raise ValueError(
            f"{base.__name__}'s blocks make {', '.join(outputs) or 'nothing'}; a diffusion stage makes images, videos "
            "and sound"
        )
    guidance = _guidance_of(pipe)

    def call(self: Any, **inputs: Any) -> ModularOutput:
        return self.run(inputs)

    call.__signature__ = _signature_of(pipe, guidance)  # type: ignore[attr-defined]
    body: dict[str, Any] = {
        "__module__": base.__module__,
        "__call__": call,
        "output_name": made,
        "sound_name": next((name for name in _SOUNDS if name in outputs and OUTPUTS[made] == "video"), None),
        "guidance": guidance,
        "names_passes": _names_passes(pipe._blocks),
        "on_value": staticmethod(lambda name, value: None),
        "on_step": staticmethod(lambda step: None),
    }
    return type(base.__name__, (ModularCall, base), body | _latent_methods(pipe))


def _names_passes(block: Any) -> bool:
    """Whether a block, or one in it, calls a denoiser in diffusers' `cache_context`."""
    code = getattr(inspect.unwrap(type(block).__call__), "__code__", None)
    own = code is not None and "cache_context" in code.co_names
    return own or any(_names_passes(inner) for inner in block.sub_blocks.values())


def _guidance_of(pipe: ModularPipeline) -> dict[str, str]:
    """Arguments that set the scale of a guider: `guidance_scale` that of `guider`, `guidance_scale_2` of `guider_2`."""
    inputs = {param.name for param in inputs_of(pipe)}
    guiders = [
        name
        for name, value in pipe.components.items()
        if isinstance(value, BaseGuidance) and "guidance_scale" in value.config
    ]
    named = {name.replace("guider", "guidance_scale"): name for name in guiders if "guider" in name}
    return {argument: name for argument, name in named.items() if argument not in inputs}


def _signature_of(pipe: ModularPipeline, guidance: Mapping[str, str]) -> inspect.Signature:
    keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for param in inputs_of(pipe):
        kind = type_of(param)
        annotation = empty if kind is None else kind
        parameters.append(inspect.Parameter(param.name, keyword, default=param.default, annotation=annotation))
    for argument, guider in guidance.items():
        config = getattr(pipe, guider).config
        default = config["guidance_scale"] if config.get("enabled", True) else None
        parameters.append(inspect.Parameter(argument, keyword, default=default, annotation=float))
    return inspect.Signature(parameters)


def inputs_of(pipe: ModularPipeline) -> list[InputParam]:
    """The inputs of the blocks, but for the one without a name: a collection of what the denoiser reads."""
    return [param for param in pipe._blocks.inputs if param.name is not None]


def type_of(param: InputParam) -> Any:
    """The type of an input: its own, that of diffusers' template of this name, or None."""
    if param.type_hint is not None:
        return param.type_hint
    template = INPUT_PARAM_TEMPLATES.get(param.name, {})
    return template.get("type_hint", _UNTYPED.get(param.name))


def _latent_methods(pipe: ModularPipeline) -> dict[str, Any]:
    """Methods that bring latents into the form of the VAE, for previews: those of the model's other pipeline."""
    model_name = pipe._blocks.model_name
    maps = (auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING, auto_pipeline.AUTO_TEXT2VIDEO_PIPELINES_MAPPING)
    other = next((found[model_name] for found in maps if model_name in found), None)
    names = ("_unpack_latents", "_unpatchify_latents")
    return {name: inspect.getattr_static(other, name) for name in names if other is not None and hasattr(other, name)}
