# SPDX-License-Identifier: Apache-2.0
"""One output of one request of a diffusion stage: the job, its result, and encoded prompts between two stages."""

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_omni.diffusion.batched_call import ModuleCall
from vllm_omni.diffusion.pipeline_call import PipelineCall
from vllm_omni.diffusion.trajectory import TrajectoryRecorder
from vllm_omni.outputs import StageOutput, Trajectory


class Adapter(NamedTuple):
    """A LoRA adapter and its scale; name and path are None for none."""

    name: str | None = None
    path: str | None = None
    scale: float = 1.0


NO_ADAPTER = Adapter()


@dataclass(slots=True, frozen=True)
class Progress:
    """The progress of a job.

    Attributes:
        index: Which of the request's outputs.
        step, num_steps: The last completed step, from 0, and the number of steps.
        preview: uint8 `[height, width, 3]` on the CPU, or None.
    """

    index: int
    step: int
    num_steps: int
    preview: torch.Tensor | None


@dataclass(slots=True, kw_only=True, eq=False)
class DiffusionJob:
    """
    Attributes:
        request_id: The job's request.
        index: Which of its outputs.
        pipeline_class: The diffusers class that runs it, with the loaded components.
        arguments: Of the pipeline's call; the runner adds its own.
        seed: Of the output's random numbers. They are drawn on the CPU: the same on every device.
        latents_only: Skip decoding.
        adapter: The LoRA adapter.
        preview_every: Steps between previews; 0: none.
        stochastic_sampling: Sets the scheduler's, if it is not None.
        trajectory_bytes: The most memory that its recorded steps may take; None: they are not recorded.
        encoded_prompts: The results of the pipeline's calls of `encode_prompt`, if an earlier stage has made them.
        on_progress: Called after every step.
        priority: The request's; the least comes first.
        arrival: When the stage's engine got it (`time.monotonic()`).
    """

    request_id: str
    index: int
    pipeline_class: type
    arguments: dict[str, Any]
    seed: int
    latents_only: bool = False
    adapter: Adapter = NO_ADAPTER
    preview_every: int = 0
    stochastic_sampling: bool | None = None
    trajectory_bytes: int | None = None
    encoded_prompts: list[Any] | None = None
    on_progress: Callable[[Progress], None] = field(default=lambda progress: None)
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job whose pipeline runs.

    Attributes:
        waiting: The module call that it waits for.
        sides: Of those a modular pipeline's blocks compute one after the other.
        size: Height and width of the output in pixels, once the pipeline has computed them.
        latents: Those after the last step; kept only for previews.
        num_calls: Completed module calls.
        called: The functions of its module calls.
        has_started: A step is complete, or a network has failed; before, a ValueError means an invalid request.
        num_completed, num_steps: Completed steps, and all; 0 before the first is complete.
        seconds: Of its module calls, also of those that were computed as one with others'.
        seconds_before_steps: Of these, those of encoders.
        recorder: Records its steps.
    """

    job: DiffusionJob
    call: PipelineCall
    waiting: ModuleCall | None = None
    sides: dict[str, int] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    latents: torch.Tensor | None = None
    num_calls: int = 0
    called: set[Callable[..., Any]] = field(default_factory=set)
    has_started: bool = False
    num_completed: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    seconds_before_steps: float = 0.0
    recorder: TrajectoryRecorder | None = None

    @property
    def waiting_call(self) -> ModuleCall:
        assert self.waiting is not None
        return self.waiting

    def add_seconds(self, seconds: float) -> None:
        """A module call has taken so long, with all up to its next one."""
        if self.num_completed <= 1:
            self.seconds_before_steps = self.seconds
        self.seconds += seconds

    def slowdown(self, now: float) -> float:
        """How many times as long as its module calls take, it takes from its arrival to its end, if it is not
        interrupted any more.

        Steps to come take as long as those before; what follows the last step is not known.
        """
        per_step = (self.seconds - self.seconds_before_steps) / max(self.num_completed, 1)
        to_come = per_step * (self.num_steps - self.num_completed)
        return (now - self.job.arrival + to_come) / (self.seconds + to_come)

    def release(self) -> None:
        """Frees its memory on the device, without waiting for Python's garbage collection of cycles."""
        self.waiting = self.latents = self.recorder = None
        self.call.close()


@dataclass(slots=True, frozen=True)
class JobEnd:
    """How a job ended.

    Attributes:
        output: An image float32 `[height, width, channels]` in [0, 1], or the layers of one; a video `[frames,
            height, width, channels]`, audio `[channels, samples]`, or latents; on the CPU. Of a stage that encodes
            prompts: the results of `encode_prompt`.
        sound: Of a video, if the pipeline makes both: `[channels, samples]`, or latents; on the CPU.
        trajectory: Its steps, if the job has them recorded.
        error: The reason for no output; without its frames, which would keep the pipeline's tensors.
        traceback: Its text.
        is_invalid: The request itself was wrong.
    """

    job: DiffusionJob
    output: Any = None
    sound: torch.Tensor | None = None
    trajectory: Trajectory | None = None
    error: Exception | None = None
    traceback: str = ""
    is_invalid: bool = False

    @classmethod
    def failed(cls, job: DiffusionJob, error: Exception, is_invalid: bool) -> "JobEnd":
        text = "".join(traceback.format_exception(error))
        return cls(job, error=error.with_traceback(None), traceback=text, is_invalid=is_invalid)


_NAME = "prompt_embeds"


def pack_encoded_prompts(results: list[Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Encoded prompts for another stage, whose pipeline calls `encode_prompt` as usual and gets these results.

    Args:
        results: Of each call of `encode_prompt`: tensors and None, in nested tuples and lists.

    Returns:
        `StageOutput.tensors` and `StageOutput.data`.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, {_NAME: _pack(results, tensors)}


def unpack_encoded_prompts(output: StageOutput) -> list[Any] | None:
    """The argument of `pack_encoded_prompts`; None for an output without encoded prompts."""
    return _unpack(output.data[_NAME], output.tensors) if _NAME in output.data else None


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = f"{_NAME}.{len(tensors)}"
        tensors[name] = value.cpu()
        return name
    if isinstance(value, tuple | list):
        return [type(value).__name__, *(_pack(item, tensors) for item in value)]
    if value is not None:
        raise TypeError(f"encode_prompt returned a {type(value).__name__}; only tensors can be sent to another stage")
    return None


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, str):
        return tensors[value]
    if value is None:
        return None
    kind, *items = value
    unpacked = [_unpack(item, tensors) for item in items]
    return tuple(unpacked) if kind == "tuple" else unpacked
