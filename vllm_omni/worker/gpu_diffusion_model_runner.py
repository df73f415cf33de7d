# SPDX-License-Identifier: Apache-2.0
"""Runs concurrent calls of a diffusers pipeline: each waits at a module call, and module calls are computed together.

It knows no pipeline by name; the executor decides what is computed when.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from vllm_omni.config.dit_config import DiTConfig
from vllm_omni.diffusion.batched_call import ModuleCall
from vllm_omni.diffusion.cache_state import Caches
from vllm_omni.diffusion.job import Adapter, DiffusionJob, JobEnd, Progress, RunningJob
from vllm_omni.diffusion.lora import AdapterManager
from vllm_omni.diffusion.media_inputs import call_parameters
from vllm_omni.diffusion.modular import ModularCall, Step
from vllm_omni.diffusion.module_state import ModuleState
from vllm_omni.diffusion.pipeline_call import (
    CallAborted,
    PipelineCall,
    gate_modules,
    is_gated,
    modules_of,
    on_method,
    set_dtypes,
    set_execution_device,
)
from vllm_omni.diffusion.pipeline_info import ANY_NUM_FRAMES, SOUND_FIELD, VAE_CHANNELS, check_num_frames
from vllm_omni.diffusion.preview import check_previews, estimate_clean, make_preview
from vllm_omni.diffusion.prompt_cache import PromptCache
from vllm_omni.diffusion.trajectory import StepHook, TrajectoryRecorder, hook_steps
from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)

# Components that make sound, the last of a pipeline first, and their names for its samples per second.
_SOUND_MAKERS = ("vocoder", "vae")
_RATES = ("output_sampling_rate", "sampling_rate", "sample_rate")


class _PromptsEncoded(BaseException):
    """Ends the pipeline's call of a stage that only encodes prompts."""


class DiffusionModelRunner:
    """The jobs of one loaded pipeline.

    Attributes:
        running: Jobs that wait for a module call, the longest-waiting first.
        changed: Networks that a pipeline's call has changed for all others. If there are any, the first job runs to its
            end before another one continues.
        sample_rate: Samples per second of the pipeline's audio, if it makes any.
        prompt_cache: Encoded prompts.
    """

    def __init__(self, pipe: DiffusionPipeline, config: DiTConfig, device: torch.device) -> None:
        """
        Raises:
            ValueError: An adapter of the configuration is not for this pipeline.
        """
        self.running: list[RunningJob] = []
        self.changed: list[str] = []
        self._config = config
        self._pipe = pipe
        self._device = device
        self._pipes: dict[type, DiffusionPipeline] = {}
        self._state: ModuleState | None = None
        self._owner: RunningJob | None = None  # the job that has changed networks
        self._active_adapter: Adapter | None = None
        # Other processes of the denoiser have no adapters.
        self._adapters = AdapterManager(pipe, config.max_loras if config.world_size == 1 else 0)
        for name, path in config.lora_modules.items():
            self._adapters.check(name, path)
        set_dtypes(pipe)
        self.sample_rate = _find_sample_rate(pipe)
        self.prompt_cache = PromptCache(config.prompt_cache_bytes)
        self._caches = None if config.cache_backend is None else Caches(pipe)

    @property
    def networks(self) -> list[torch.nn.Module]:
        """The pipeline's networks; those that a stage's part leaves out have no weights, and are on another device."""
        return list(modules_of(self._pipe).values())

    @property
    def host_weight_bytes(self) -> int:
        """The bytes of the pipeline's weights that are in host memory."""
        weights = (weight for network in self.networks for weight in network.parameters())
        return sum(weight.nbytes for weight in weights if weight.device.type == "cpu")

    def check_adapter(self, name: str, path: str) -> None:
        """
        Raises:
            ValueError: It is no adapter for this pipeline.
        """
        self._adapters.check(name, path)

    def start(self, job: DiffusionJob) -> JobEnd | None:
        """Calls the pipeline, up to its first module call. Returns the end of the job if it ends before.

        Raises:
            torch.AcceleratorError: The device is broken. All methods that continue a job raise it.
        """
        try:
            self.activate(job.adapter)
            if gate_modules(self._pipe):
                self._state = None
            running = RunningJob(job, PipelineCall(self._pipe_for(job.pipeline_class), self._caches))
            arguments = self._prepare(running)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            return JobEnd.failed(job, error, is_invalid=isinstance(error, (ValueError, TypeError)))
        return self._advance(running, lambda: running.call.start(arguments))

    def activate(self, adapter: Adapter) -> None:
        """Makes the modules compute with this LoRA adapter, which a job has started with before."""
        if adapter != self._active_adapter:
            self._active_adapter = self._state = None
            self._adapters.activate(*adapter)
            self._active_adapter = adapter

    def name_of(self, function: Callable[..., Any]) -> str:
        """The component of the pipeline that a module call calls."""
        names = [name for name, module in modules_of(self._pipe).items() if is_gated(module, function)]
        return names[0] if names else type(function).__name__

    def resume(self, running: RunningJob, output: Any) -> JobEnd | None:
        """Continues a job up to its next module call. `output` is that of its last one, or the exception that it
        raised."""
        self.running.remove(running)
        running.num_calls += 1
        if isinstance(output, Exception):
            running.has_started = True
            return self._advance(running, lambda: running.call.throw(output))
        return self._advance(running, lambda: running.call.resume(output))

    def abort(self, running: RunningJob) -> None:
        """Aborts a job."""
        self.running.remove(running)
        try:
            self._advance(running, lambda: running.call.throw(CallAborted()))
        except CallAborted as aborted:
            aborted.with_traceback(None)  # Its frames refer to it: a reference cycle.
            running.call.pipe.maybe_free_model_hooks()
            self._release(running)

    def _pipe_for(self, pipeline_class: type) -> DiffusionPipeline:
        """The loaded components as another pipeline, e.g. for image to image."""
        if pipeline_class not in self._pipes:
            pipe = self._pipes[pipeline_class] = self._make_pipe(pipeline_class)
            pipe.set_progress_bar_config(disable=True)
            set_execution_device(pipe, self._device)
        return self._pipes[pipeline_class]

    def _is_own(self, pipeline_class: type) -> bool:
        """Whether the loaded pipeline runs this class itself. A modular one runs all that its checkpoint can do; its
        class is made anew each time that the checkpoint is opened."""
        return pipeline_class is type(self._pipe) or isinstance(self._pipe, ModularCall)

    def _make_pipe(self, pipeline_class: "type[DiffusionPipeline]") -> DiffusionPipeline:
        if self._is_own(pipeline_class):
            return copy.copy(self._pipe)
        # diffusers' own `from_pipe` would convert the weights, which all pipelines share, to one dtype.
        components, options = pipeline_class._get_signature_keys(pipeline_class)
        arguments: dict[str, Any] = {name: self._pipe.components.get(name) for name in components}
        arguments |= {name: self._pipe.config[name] for name in options if name in self._pipe.config}
        return pipeline_class(**arguments)

    def _prepare(self, running: RunningJob) -> dict[str, Any]:
        """The arguments of the pipeline's call. Sets the hooks on the pipeline.

        Raises:
            ValueError: The pipeline cannot make this size, or has no previews.
        """
        job, pipe = running.job, running.call.pipe
        arguments = _on_device(job.arguments, self._device)
        if not self._is_own(job.pipeline_class):
            arguments = fit_image(pipe, arguments)
        arguments = add_alpha(pipe, arguments)
        check_size(pipe, arguments)
        if job.preview_every:
            check_previews(pipe)
        if isinstance(pipe, ModularCall):
            pipe.on_value = lambda name, value: self._on_value(running, name, value)
            pipe.on_step = self._watch_steps(running)
        on_method(pipe, "prepare_latents", lambda method, arguments: self._on_prepare(running, method, arguments))
        if job.encoded_prompts is not None:
            results = iter(_on_device(job.encoded_prompts, self._device))
            on_method(pipe, "encode_prompt", lambda method, arguments: next(results))
        else:
            cache = self.prompt_cache
            on_method(pipe, "encode_prompt", lambda *called: cache.encode(pipe, job.adapter, *called))
        if self._config.part == "encoder":
            encoded = running.call.result = []
            on_method(pipe, "encode_prompt", lambda method, arguments: _keep(encoded, method()))
        # Not "pt": some pipelines return tensors of another range then.
        own = {
            "generator": self._prepare_steps(running, torch.Generator().manual_seed(job.seed)),
            "output_type": "latent" if job.latents_only else "np",
        }
        if arguments.get("padding_mask_crop") is not None and not job.latents_only:
            own["output_type"] = "pil"  # The only one that pipelines put the crop back into.
        known = call_parameters(job.pipeline_class)
        return {**arguments, **self._callbacks(running), **{name: own[name] for name in own if name in known}}

    def _prepare_steps(self, running: RunningJob, generator: torch.Generator) -> torch.Generator:
        """Sets how the scheduler steps, with this generator.

        Raises:
            ValueError: The pipeline has no such scheduler.
        """
        job = running.job
        scheduler: Any = getattr(running.call.pipe, "scheduler", None)
        if not hasattr(scheduler, "step"):
            if job.trajectory_bytes is not None or job.stochastic_sampling is not None:
                name = type(running.call.pipe).__name__
                raise ValueError(f"{name} has no scheduler for return_trajectory and stochastic_sampling; remove them")
            return generator
        if job.stochastic_sampling is not None:
            if "stochastic_sampling" not in scheduler.config:
                raise ValueError(f"{type(scheduler).__name__} has no stochastic_sampling; remove it")
            scheduler.register_to_config(stochastic_sampling=job.stochastic_sampling)
        if job.trajectory_bytes is not None:
            running.recorder = TrajectoryRecorder(generator, scheduler, job.trajectory_bytes)
        hook_steps(scheduler, running.recorder or StepHook(generator))
        return generator

    def _on_prepare(self, running: RunningJob, method: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """The pipeline has computed its sizes and encoded the prompt."""
        height, width = arguments.get("height"), arguments.get("width")
        if height and width:
            check_pixels(height, width, self._config.max_pixels)
            running.size = (height, width)
        check_frames(arguments.get("num_frames") or 1, self._config.max_frames)
        if self._config.part == "encoder":
            raise _PromptsEncoded
        prepared = method()
        if running.job.preview_every:
            running.latents = prepared[0] if isinstance(prepared, tuple) else prepared
        return prepared

    def _on_value(self, running: RunningJob, name: str, value: Any) -> None:
        """A modular pipeline has a new value: an argument, or one that its blocks have computed."""
        if name in ("height", "width") and isinstance(value, int):
            running.sides[name] = value
            if len(running.sides) == 2:
                height, width = running.size = (running.sides["height"], running.sides["width"])
                check_pixels(height, width, self._config.max_pixels)
        elif name == "num_frames" and isinstance(value, int):
            check_frames(value, self._config.max_frames)

    def _watch_steps(self, running: RunningJob) -> Callable[[Step], None]:
        """What is called after each step of a modular pipeline's loop."""
        numbers = itertools.count()

        def on_step(step: Step) -> None:
            number = next(numbers)
            if running.job.preview_every:
                running.latents = step.before
            self._on_step(running, number, step.after, max(step.num_steps, number + 1))

        return on_step

    def _callbacks(self, running: RunningJob) -> dict[str, Any]:
        """The pipeline's callback after each step; the older one where it has no other, or the scheduler's steps."""
        if isinstance(running.call.pipe, ModularCall):
            return {}
        parameters = call_parameters(running.job.pipeline_class)
        if "callback_on_step_end" in parameters:

            def on_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                self._on_step(running, step, tensors["latents"])
                return {}

            return {"callback_on_step_end": on_step_end, "callback_on_step_end_tensor_inputs": ["latents"]}
        if "callback" in parameters:
            return {"callback": lambda step, timestep, latents: self._on_step(running, step, latents)}
        steps = itertools.count()

        def on_scheduler_step(method: Callable[[], Any], arguments: dict[str, Any]) -> Any:
            result = method()
            self._on_step(running, next(steps), result[0])
            return result

        on_method(getattr(running.call.pipe, "scheduler", None), "step", on_scheduler_step)
        return {}

    def _on_step(
        self, running: RunningJob, step: int, latents: torch.Tensor | None, num_steps: int | None = None
    ) -> None:
        job, pipe = running.job, running.call.pipe
        running.has_started = True
        if num_steps is None:
            num_steps = (
                len(pipe.scheduler.timesteps) if getattr(pipe, "num_timesteps", None) is None else pipe.num_timesteps
            )
        running.num_completed, running.num_steps = step + 1, num_steps
        preview = None
        if job.preview_every and latents is not None:
            if (step + 1) % job.preview_every == 0 and step + 1 < num_steps:
                preview = self._preview(running, step, latents)
            running.latents = latents
        job.on_progress(Progress(job.index, step, num_steps, preview))

    def _preview(self, running: RunningJob, step: int, latents: torch.Tensor) -> torch.Tensor:
        pipe, before = running.call.pipe, running.latents
        scheduler = getattr(pipe, "scheduler", None)
        clean = latents
        if scheduler is not None and before is not None:
            clean = estimate_clean(scheduler, step, before, latents)
        if running.size is None:
            raise ValueError(f"{type(pipe).__name__} has no previews: the size of its output is not known")
        return make_preview(pipe, clean, *running.size, self._config.preview_size)

    def _advance(self, running: RunningJob, proceed: Callable[[], ModuleCall | None]) -> JobEnd | None:
        """Runs the pipeline. None if it waits for its next module call."""
        job, call = running.job, running.call
        if self._state is None:
            self._state = ModuleState(modules_of(self._pipe))
        try:
            running.waiting = proceed()
            if running.waiting is not None:
                self._find_changes(running)
                self.running.insert(0 if self.changed else len(self.running), running)
                return None
            output, sound = as_output(call.result), _sound_of(call.result)
            recorder = running.recorder
            end = JobEnd(job, output, sound, None if recorder is None else recorder.trajectory())
        except _PromptsEncoded:
            end = JobEnd(job, call.result)
        except torch.AcceleratorError:
            raise  # The device is in an unusable state.
        except Exception as error:
            call.pipe.maybe_free_model_hooks()  # the pipeline does this itself when it succeeds
            # A later error is not one of the arguments, but of a result that was computed with them.
            end = JobEnd.failed(job, error, isinstance(error, (ValueError, TypeError)) and not running.has_started)
        self._release(running)
        return end

    def _find_changes(self, running: RunningJob) -> None:
        """Looks for networks that the pipeline's call has changed before it called one for the first time."""
        function = running.waiting_call.function
        if function in running.called:
            return
        running.called.add(function)
        assert self._state is not None
        changed = self._state.find_changed()
        if changed:
            self._owner = running
            if not self.changed:
                pipeline, networks = type(running.call.pipe).__name__, ", ".join(changed)
                logger.warning("%s changes %s while it runs: this stage runs one request at a time", pipeline, networks)
            self.changed = [*self.changed, *(name for name in changed if name not in self.changed)]

    def _release(self, running: RunningJob) -> None:
        """Frees the job's memory, and takes back what it has changed in networks."""
        if self._state is not None and self._owner in (None, running) and self._state.find_changed():
            self._state.restore()
        if self._owner is running:
            self._owner = None
        running.release()


def _keep(results: list[Any], result: Any) -> Any:
    results.append(result)
    return result


def _on_device(value: Any, device: torch.device) -> Any:
    """A value with its tensors, in dicts, lists and tuples, on a device. Other stages' are on the CPU."""
    match value:
        case torch.Tensor():
            return value.to(device)
        case dict():
            return {key: _on_device(item, device) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_on_device(item, device) for item in value)
        case _:
            return value


def _find_sample_rate(pipe: DiffusionPipeline) -> int | None:
    configs = [pipe.components[name].config for name in _SOUND_MAKERS if pipe.components.get(name) is not None]
    return next((getattr(config, name) for config in configs for name in _RATES if hasattr(config, name)), None)


def as_output(result: Any) -> torch.Tensor:
    """The only output of a pipeline's call, as `JobEnd` describes it.

    Raises:
        TypeError: It is not one array for each output.
    """
    outputs = result[0]  # the first field of every output class
    if len(outputs) == 1 and isinstance(outputs[0], Image.Image):
        return _on_cpu(np.asarray(outputs[0].convert("RGB"), np.float32) / 255)
    if isinstance(outputs, np.ndarray) and outputs.ndim == 4 and len(outputs) > 1:
        return _on_cpu(outputs)  # The frames of one video, or several pictures of one image: a call has one prompt.
    if len(outputs) != 1 or not isinstance(outputs[0], (np.ndarray, torch.Tensor)):
        raise TypeError(f"the pipeline returned {type(outputs).__name__} where one array was expected")
    return _on_cpu(outputs[0])


def _sound_of(result: Any) -> torch.Tensor | None:
    """The sound of the only video of a pipeline's call, as `JobEnd` describes it."""
    sound = result.get(SOUND_FIELD) if isinstance(result, dict) else None
    return None if sound is None else _on_cpu(sound[0])


def _on_cpu(value: np.ndarray | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(value).float().cpu()


_PROCESSORS = ("image_processor", "video_processor")
_ROUND_SIZE = 32
"""Pixels: every image-to-image pipeline makes multiples of this."""
_TEMPORAL_FACTORS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")


def check_size(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> None:
    """
    Args:
        arguments: Of the pipeline's call.

    Raises:
        ValueError: The pipeline would silently make another height, width or number of frames; names the nearest.
    """
    factor = _spatial_factor(pipe)
    for name in ("height", "width"):
        size = arguments.get(name)
        if factor and size is not None and size % factor:
            raise ValueError(f"{name} {size}: this pipeline makes multiples of {factor}{_near(size, factor)}")
    factor = next((getattr(pipe, name) for name in _TEMPORAL_FACTORS if hasattr(pipe, name)), None)
    num_frames = None if type(pipe).__name__ in ANY_NUM_FRAMES else arguments.get("num_frames")
    if factor and num_frames is not None:
        check_num_frames(num_frames, factor)


def fit_image(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> dict[str, Any]:
    """Resizes an input image to the size of the output: the request's, or nearly the image's own.

    Most pipelines do this for the request's size, in the same way; some fail on any other size.

    Args:
        arguments: Of the call of an image-to-image pipeline.

    Returns:
        The arguments with the resized image and its size.
    """
    image = arguments.get("image")
    if not isinstance(image, Image.Image) or "height" not in call_parameters(type(pipe)):
        return arguments
    width, height = (
        arguments.get(name) or max(_ROUND_SIZE, side // _ROUND_SIZE * _ROUND_SIZE)
        for name, side in (("width", image.width), ("height", image.height))
    )
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    return {**arguments, "width": width, "height": height, "image": image}


def add_alpha(pipe: DiffusionPipeline, arguments: dict[str, Any]) -> dict[str, Any]:
    """Gives an input image an opaque alpha channel where the pipeline's autoencoder reads one."""
    image, vae = arguments.get("image"), pipe.components.get("vae")
    if not isinstance(image, Image.Image) or vae is None or vae.config.get(VAE_CHANNELS) != 4:
        return arguments
    return {**arguments, "image": image.convert("RGBA")}


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """
    Raises:
        ValueError: The size exceeds the stage's limit.
    """
    if height * width > max_pixels:
        raise ValueError(
            f"{height} x {width} is {height * width} pixels; this stage makes at most {max_pixels} (max_pixels)"
        )


def check_frames(num_frames: int, max_frames: int) -> None:
    """
    Raises:
        ValueError: The pipeline has chosen a longer video than the stage allows.
    """
    if num_frames > max_frames:
        raise ValueError(
            f"the pipeline would make {num_frames} frames; this stage makes at most {max_frames} (max_frames): set "
            "num_frames"
        )


def _spatial_factor(pipe: DiffusionPipeline) -> int | None:
    processors = (getattr(pipe, name, None) for name in _PROCESSORS)  # an image encoder's is of another class
    processor = next((found for found in processors if isinstance(found, VaeImageProcessor)), None)
    if processor is None:
        return None
    # The processors of some, as Stable Diffusion 3, know the VAE's factor only.
    patch = getattr(pipe, "vae_scale_factor", 0) * getattr(pipe, "patch_size", 0)
    return max(processor.config.vae_scale_factor, patch)


def _near(size: int, factor: int) -> str:
    below = size // factor * factor
    nearest = [str(value) for value in (below, below + factor) if value > 0]
    return f"; the nearest {'is' if len(nearest) == 1 else 'are'} {' and '.join(nearest)}"
