# SPDX-License-Identifier: Apache-2.0
"""One output of one request of a diffusion stage: what is to be made, and how it ended."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_omni.diffusion.batched_call import ModuleCall
from vllm_omni.diffusion.pipeline_call import PipelineCall
from vllm_omni.outputs import StageOutput


class Adapter(NamedTuple):
    """A LoRA adapter and how strongly it counts; both names None where there is none."""

    name: str | None = None
    path: str | None = None
    scale: float = 1.0


NO_ADAPTER = Adapter()


@dataclass(slots=True, frozen=True)
class Progress:
    """How far a job has come.

    Attributes:
        index: Which of the request's outputs.
        step, num_steps: The step that is done, from 0, and how many there will be.
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
        request_id: The request that this is for.
        index: Which of its outputs.
        pipeline_class: The diffusers class that makes it, of the components that are loaded.
        arguments: Of the pipeline's call; the runner adds what it needs itself.
        seed: Of the output's own random numbers. They are drawn on the CPU: the same on every device.
        latents_only: Leave out the decoding.
        adapter: The LoRA adapter that it runs with.
        preview_every: A preview after every so many steps; 0: none.
        encoded_prompts: What each call of the pipeline's `encode_prompt` returns, where an earlier stage has done it.
        on_progress: Is told of every step.
    """

    request_id: str
    index: int
    pipeline_class: type
    arguments: dict[str, Any]
    seed: int
    latents_only: bool = False
    adapter: Adapter = NO_ADAPTER
    preview_every: int = 0
    encoded_prompts: list[Any] | None = None
    on_progress: Callable[[Progress], None] = field(default=lambda progress: None)


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job whose pipeline runs.

    Attributes:
        waiting: The module call that it waits for.
        size: Height and width of the output in pixels, once the pipeline has said so.
        latents: What the last step left; kept only where there are previews to make.
        num_calls: Module calls that are done.
        has_begun: A step is done, or a network has failed; until then a ValueError is the request's fault.
    """

    job: DiffusionJob
    call: PipelineCall
    waiting: ModuleCall | None = None
    size: tuple[int, int] | None = None
    latents: torch.Tensor | None = None
    num_calls: int = 0
    has_begun: bool = False

    @property
    def waiting_call(self) -> ModuleCall:
        assert self.waiting is not None
        return self.waiting

    def let_go(self) -> None:
        """It has ended: nothing of it stays on the device until Python looks for reference cycles."""
        self.waiting = self.latents = None
        self.call.close()


@dataclass(slots=True, frozen=True)
class JobEnd:
    """How a job ended.

    Attributes:
        output: A picture float32 `[height, width, channels]` in [0, 1], a video `[frames, height, width, channels]`,
            sound `[channels, samples]`, or latents; on the CPU. Of a stage that encodes prompts: what `encode_prompt`
            returned.
        error: Why there is none; without its frames, which would keep all that the pipeline has computed.
        traceback: Where that was raised.
        is_invalid: The request itself was wrong.
    """

    job: DiffusionJob
    output: Any = None
    error: Exception | None = None
    traceback: str = ""
    is_invalid: bool = False

    @classmethod
    def failed(cls, job: DiffusionJob, error: Exception, is_invalid: bool) -> "JobEnd":
        text = "".join(traceback.format_exception(error))
        return cls(job, error=error.with_traceback(None), traceback=text, is_invalid=is_invalid)


_NAME = "prompt_embeds"


def pack_encoded_prompts(results: list[Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """
    Args:
        results: What each call returned: tensors and None, in any depth of tuples and lists.

    Returns:
        `StageOutput.tensors` and `StageOutput.data`.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, {_NAME: _pack(results, tensors)}


def unpack_encoded_prompts(output: StageOutput) -> list[Any] | None:
    """What `pack_encoded_prompts` was given; None where the output has none."""
    return _unpack(output.data[_NAME], output.tensors) if _NAME in output.data else None


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = f"{_NAME}.{len(tensors)}"
        tensors[name] = value.cpu()
        return name
    if isinstance(value, tuple | list):
        return [type(value).__name__, *(_pack(item, tensors) for item in value)]
    if value is not None:
        raise TypeError(f"encode_prompt returned a {type(value).__name__}; only tensors can be handed to another stage")
    return None


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, str):
        return tensors[value]
    if value is None:
        return None
    kind, *items = value
    unpacked = [_unpack(item, tensors) for item in items]
    return tuple(unpacked) if kind == "tuple" else unpacked
