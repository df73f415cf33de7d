# SPDX-License-Identifier: Apache-2.0
"""The denoising steps of one output: their noise comes from its seed, and a trainer gets them as actions of a policy.

As in DDPO (https://arxiv.org/abs/2305.13301) and Flow-GRPO (https://arxiv.org/abs/2505.05470), a step is an action: its
latents are those of the same step without noise, plus the noise times a deviation, which depends on the schedule alone.
Schedulers are not known by name: what a step draws, and by what it multiplies it, is found by calls of the step itself.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vllm_omni.outputs import Trajectory

_HOOK = "_omni_step_hook"
_MUCH = 1024.0
"""Noise beside which rounding is little, and which half precision can hold."""
_LOG_SQRT_2_PI = math.log(2 * math.pi) / 2


class StepHook:
    """Called for each step of a job's schedulers.

    A step without a generator gets that of the job: some pipelines pass none, and diffusers would then draw the noise
    from the process's random numbers.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepHook":
        return self  # A pipeline may copy its scheduler: the noise of all is of the one generator.

    def __call__(self, scheduler: Any, step: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        """
        Args:
            step: Of the scheduler's class.
            bound: Its arguments.
        """
        if "generator" in bound.signature.parameters and bound.arguments.get("generator") is None:
            bound.arguments["generator"] = self._generator
        return self._call(scheduler, step, bound)

    def _call(self, scheduler: Any, step: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        return _call(scheduler, step, bound)


def _call(scheduler: Any, step: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    return step(*bound.args, **bound.kwargs)


def hook_steps(scheduler: Any, hook: StepHook) -> None:
    """Calls a hook instead of the steps of this scheduler, and of copies of it."""
    if _HOOK not in vars(type(scheduler)):
        scheduler_class: type = type(scheduler)
        scheduler.__class__ = _hooked(scheduler_class)
    setattr(scheduler, _HOOK, hook)


class _EqualToItsBase(type):
    """The type of a hooked class, which is equal to its base: some pipelines compare a scheduler's type with it."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__base__

    def __hash__(cls) -> int:
        return hash(cls.__base__)


@functools.cache
def _hooked(scheduler_class: type) -> type:
    """A class that differs in `step` only: pipelines look at its signature, at the class and at its name."""
    method = scheduler_class.step  # type: ignore[attr-defined]
    signature = inspect.signature(method)

    @functools.wraps(method)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = getattr(self, _HOOK)  # None of another scheduler that a pipeline makes of the class.
        return (hook or _call)(self, method, signature.bind(self, *args, **kwargs))

    members = {"step": step, "__module__": scheduler_class.__module__, _HOOK: None}
    return _EqualToItsBase(scheduler_class.__name__, (scheduler_class,), members)


@dataclass(slots=True)
class _Step:
    """
    Attributes:
        sample: The latents before it, on the CPU, as `noise`, which is None if it has drawn none.
        deviations: The least and the greatest factor of the noise, `[2]`.
    """

    sample: torch.Tensor
    timestep: torch.Tensor
    noise: torch.Tensor | None
    deviations: torch.Tensor


class TrajectoryRecorder(StepHook):
    """Records the steps of one scheduler."""

    def __init__(self, generator: torch.Generator, scheduler: Any, max_bytes: int) -> None:
        """
        Args:
            max_bytes: The most memory that the trajectory may take.
        """
        super().__init__(generator)
        self._scheduler = scheduler
        self._max_bytes = max_bytes
        self._steps: list[_Step] = []
        self._last: torch.Tensor | None = None
        self._num_bytes = 0

    def trajectory(self) -> Trajectory:
        """Call it when the output is on the CPU: what steps have left there is complete then.

        Raises:
            ValueError: There have been no steps, or they are not those of a policy with one deviation for each.
        """
        if self._last is None:
            raise ValueError("return_trajectory: the pipeline has made no steps of its scheduler")
        deviations = torch.stack([step.deviations for step in self._steps]).double()
        least, greatest = deviations.unbind(1)
        if not torch.allclose(least, greatest, rtol=1e-5, atol=0):
            raise ValueError("return_trajectory: elements of one step get noise of different strength")
        std = greatest.clamp(min=0)
        noise = [torch.zeros_like(step.sample) if step.noise is None else step.noise for step in self._steps]
        log_probs = [_log_prob(step.noise, deviation) for step, deviation in zip(self._steps, std, strict=True)]
        return Trajectory(
            latents=torch.stack([*(step.sample for step in self._steps), self._last]),
            noise=torch.stack(noise),
            timesteps=torch.stack([step.timestep for step in self._steps]),
            std=std.float(),
            log_probs=torch.tensor(log_probs),
        )

    def _call(self, scheduler: Any, step: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        if scheduler is not self._scheduler:  # the pipeline's copy of it, for something else
            return super()._call(scheduler, step, bound)
        name, given = type(scheduler).__name__, bound.arguments
        sample, timestep, predicted = (given.get(key) for key in ("sample", "timestep", "model_output"))
        if not (isinstance(sample, torch.Tensor) and sample.is_floating_point() and timestep is not None):
            raise ValueError(f"return_trajectory: {name} takes no latents and timesteps")
        before = _copy(scheduler)
        with _Noise() as noise:
            result = super()._call(scheduler, step, bound)
        if len(noise.drawn) > 1 or any(drawn.shape != sample.shape for drawn in noise.drawn):
            raise ValueError(f"return_trajectory: {name} draws more than one noise of the shape of the latents")
        if noise.drawn and getattr(predicted, "shape", None) != sample.shape:
            raise ValueError(f"return_trajectory: {name} gets the deviation of the noise from the network")
        self._check_size(scheduler, 2 * sample.nbytes)  # It has noise, too, if only zeros.
        self._steps.append(
            _Step(
                sample=_on_cpu(sample),
                timestep=_on_cpu(torch.as_tensor(timestep).float().reshape(-1)[0]),
                noise=_on_cpu(noise.drawn[0]) if noise.drawn else None,
                deviations=_deviations(before, step, bound) if noise.drawn else torch.zeros(2),
            )
        )
        self._last = _on_cpu(result[0])
        return result

    def _check_size(self, scheduler: Any, num_bytes: int) -> None:
        """
        Args:
            num_bytes: Of the step.
        """
        self._num_bytes += num_bytes
        needed = self._num_bytes + num_bytes * max(0, len(scheduler.timesteps) - len(self._steps) - 1)
        if needed > self._max_bytes:
            raise ValueError(
                f"return_trajectory: the trajectory of an output takes {needed} bytes; this stage has "
                f"{self._max_bytes} for it (max_trajectory_bytes for all outputs of a request)"
            )


class _Noise(TorchFunctionMode):
    """Keeps the normal numbers that are drawn, or has others drawn in their place.

    Attributes:
        drawn: What was drawn.
    """

    def __init__(self, value: float | None = None) -> None:
        """`value`: of each number; None: as it is drawn."""
        super().__init__()
        self.drawn: list[torch.Tensor] = []
        self._value = value

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.randn, torch.randn_like):
            return func(*args, **kwargs)
        if self._value is None:
            drawn = func(*args, **kwargs)
        else:
            fill = torch.full if func is torch.randn else torch.full_like
            drawn = fill(args[0], self._value, **{key: it for key, it in kwargs.items() if key != "generator"})
        self.drawn.append(drawn)
        return drawn


def _copy(scheduler: Any) -> Any:
    """A copy for one step, which changes neither the configuration nor the schedule."""
    shared = [scheduler.config, *(vars(scheduler).get(name) for name in ("timesteps", "sigmas"))]
    return copy.deepcopy(scheduler, {id(value): value for value in shared})


def _deviations(scheduler: Any, step: Callable[..., Any], bound: inspect.BoundArguments) -> torch.Tensor:
    """The least and the greatest factor of the noise in a step, `[2]`: what is left of a step of zeros, without what is
    left of earlier steps.

    Args:
        scheduler: As it was before the step; it is used up.
    """
    zeros = {name: torch.zeros_like(bound.arguments[name]) for name in ("sample", "model_output")}
    results = []
    for value, own in ((_MUCH, _copy(scheduler)), (0.0, scheduler)):
        arguments = {**bound.arguments, **zeros, "self": own}
        without = inspect.BoundArguments(bound.signature, arguments)
        with _Noise(value):
            results.append(step(*without.args, **without.kwargs)[0].float())
    return _on_cpu(torch.stack(((results[0] - results[1]) / _MUCH).aminmax()))


def _log_prob(noise: torch.Tensor | None, deviation: torch.Tensor) -> float:
    """The log-probability of the latents after a step, mean of all elements; 0 of a step without noise."""
    if noise is None or deviation == 0:
        return 0.0
    return -float(noise.double().square().mean()) / 2 - math.log(deviation) - _LOG_SQRT_2_PI


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, without the batch dimension. A GPU goes on: the copy is complete when a later one has been waited for."""
    copied = tensor.detach().to("cpu", non_blocking=True, copy=True)
    return copied[0] if copied.ndim > 1 and len(copied) == 1 else copied
