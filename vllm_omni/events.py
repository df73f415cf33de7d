# SPDX-License-Identifier: Apache-2.0
"""What happens to a request, as its caller is told (design document 002, section 5).

    OmniEvent
    ├── ARSegmentEvent        a piece of a final stage's output: text, tokens, audio samples
    ├── ImageProgressEvent    how far a diffusion stage has come with one of its outputs
    ├── CompletedEvent        the end: all outputs, whole
    └── ErrorEvent            the end: why there are none

A request's events have rising sequence numbers, and exactly one of them, the last, is terminal.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from vllm.logprobs import Logprob

from vllm_omni.errors import RequestError
from vllm_omni.outputs import OmniRequestOutput


@dataclass(slots=True, kw_only=True)
class OmniEvent:
    """
    Attributes:
        request_id: The request, as its caller knows it.
        sequence: Counts the request's events, from 0.
        ts: When it reached the caller's process: `time.time()`, seconds since 1970.
    """

    is_terminal: ClassVar[bool] = False

    request_id: str
    sequence: int
    ts: float


@dataclass(slots=True, kw_only=True)
class ARSegmentEvent(OmniEvent):
    """What a final stage has made since the last such event of the same stage and `index`.

    Attributes:
        stage_id, final_output_type: The stage, and what it makes: `text`, `audio`, ...
        index: Which of the `n` sequences this is about.
        text, tokens, logprobs: What is new of it; empty where the stage writes none.
        multimodal_output: New rows or samples by name, on the CPU, e.g. `audio` float32 `[samples]`; of a diffusion
            stage, once and at its end, what `OmniRequestOutput.multimodal_output` has.
        finish_reason: Why the sequence ended, if it did.
        stop_reason: The stop string or token that ended it, if one did.
        is_last: Nothing follows from this stage.
    """

    stage_id: int
    final_output_type: str
    index: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    multimodal_output: dict[str, torch.Tensor] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_last: bool = False


@dataclass(slots=True, kw_only=True)
class ImageProgressEvent(OmniEvent):
    """A diffusion stage has come one step further with one of the request's outputs.

    Attributes:
        stage_id, final_output_type: The stage, and what it makes.
        index: Which of the outputs that the request asked for (`num_outputs_per_prompt`), from 0.
        step, num_steps: The step, from 0, and how many there will be.
        image: A preview, uint8 `[height, width, 3]`; None where none was asked for.
        is_last: Nothing follows from this stage.
    """

    stage_id: int
    final_output_type: str
    step: int
    num_steps: int
    index: int = 0
    image: torch.Tensor | None = None
    is_last: bool = False


@dataclass(slots=True, kw_only=True)
class CompletedEvent(OmniEvent):
    """The request is complete.

    Attributes:
        outputs: One for each final stage that the request asked for, in stage order: whole, also where events told
            of their pieces, unless `keep_outputs` is false: then text, tokens and tensors are those of the last event.
    """

    is_terminal: ClassVar[bool] = True

    outputs: list[OmniRequestOutput]


@dataclass(slots=True, kw_only=True)
class ErrorEvent(OmniEvent):
    """The request failed, and it alone."""

    is_terminal: ClassVar[bool] = True

    error: RequestError
