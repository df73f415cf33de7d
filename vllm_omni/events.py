# SPDX-License-Identifier: Apache-2.0
"""The events of a request, for its caller.

    OmniEvent
    ├── ARSegmentEvent        a segment of a final stage's output: text, tokens, audio samples
    ├── ImageProgressEvent    a diffusion stage finished a step of one of its outputs
    ├── CompletedEvent        terminal: all outputs, complete
    └── ErrorEvent            terminal: the error

A request's events have increasing sequence numbers. Exactly one event, the last, is terminal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from sys import getsizeof
from typing import ClassVar

import torch
from vllm.logprobs import Logprob

from vllm_omni.errors import RequestError
from vllm_omni.outputs import OmniRequestOutput

_EVENT_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 500, 8, 200  # About.


@dataclass(slots=True, kw_only=True)
class OmniEvent:
    """
    Attributes:
        request_id: The caller's id of the request.
        sequence: Number of the event in the request, from 0.
        ts: Time of arrival in the caller's process: `time.time()`, seconds since 1970.
        prompt_index: Which prompt of a call of `OmniLLM` the event is about, from 0.
    """

    is_terminal: ClassVar[bool] = False

    request_id: str
    sequence: int
    ts: float
    prompt_index: int = 0

    @property
    def num_bytes(self) -> int:
        """About what it takes of memory."""
        return _EVENT_BYTES

    def merge(self, later: OmniEvent) -> OmniEvent | None:
        """Both as one event, for a reader that has taken neither; None if they stay two."""
        return None


@dataclass(slots=True, kw_only=True)
class ARSegmentEvent(OmniEvent):
    """The output of a final stage since the last such event of the same stage and `index`.

    Attributes:
        stage_id, final_output_type: The stage, and the type of its output: `text`, `audio`, ...
        index: Index among the `n` sequences.
        text, tokens, logprobs: New text and tokens; empty if the stage generates none.
        multimodal_output: New rows or samples by name, on the CPU, e.g. `audio` float32 `[samples]`; of a diffusion
            stage `OmniRequestOutput.multimodal_output`, in one event at its end.
        finish_reason: Why the sequence ended, if it did.
        stop_reason: The stop string or token that ended it, if one did.
        num_cached_tokens: Tokens of the prompt that were in the engine's prefix cache, in the stage's first event; None
            if unknown.
        prompt_logprobs: Of the prompt, if requested, in the stage's first event.
        is_last: The last event of this stage.
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
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    is_last: bool = False

    @property
    def num_bytes(self) -> int:
        num_logprobs = sum(map(len, self.logprobs or ()))
        num_bytes = getsizeof(self.text) + _TOKEN_BYTES * len(self.tokens) + _LOGPROB_BYTES * num_logprobs
        return _EVENT_BYTES + num_bytes + sum(tensor.nbytes for tensor in self.multimodal_output.values())

    def merge(self, later: OmniEvent) -> OmniEvent | None:
        if (
            not isinstance(later, ARSegmentEvent)
            or (later.stage_id, later.index) != (self.stage_id, self.index)
            or self.multimodal_output
            or later.multimodal_output
        ):
            return None
        logprobs = [*(self.logprobs or ()), *(later.logprobs or ())]
        return replace(
            later,
            text=self.text + later.text,
            tokens=[*self.tokens, *later.tokens],
            logprobs=logprobs or None,
            num_cached_tokens=later.num_cached_tokens if self.num_cached_tokens is None else self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
        )


@dataclass(slots=True, kw_only=True)
class ImageProgressEvent(OmniEvent):
    """A diffusion stage finished a step of one of the request's outputs.

    Attributes:
        stage_id, final_output_type: The stage, and the type of its output.
        index: Index among the `num_outputs_per_prompt` outputs, from 0.
        step, num_steps: The step, from 0, and the number of steps.
        image: A preview, uint8 `[height, width, 3]`, if requested.
        is_last: The last event of this stage.
    """

    stage_id: int
    final_output_type: str
    step: int
    num_steps: int
    index: int = 0
    image: torch.Tensor | None = None
    is_last: bool = False

    @property
    def num_bytes(self) -> int:
        return _EVENT_BYTES + (0 if self.image is None else self.image.nbytes)


@dataclass(slots=True, kw_only=True)
class CompletedEvent(OmniEvent):
    """The request is complete.

    Attributes:
        outputs: One for each final stage of the request's modalities, in stage order. Complete, also after segment
            events. With `keep_outputs` false: text, tokens and tensors since the last event only.
    """

    is_terminal: ClassVar[bool] = True

    outputs: list[OmniRequestOutput]

    @property
    def num_bytes(self) -> int:
        media = [value for output in self.outputs for value in output.multimodal_output.values()]
        return _EVENT_BYTES + sum(getattr(value, "nbytes", 0) for value in media)


@dataclass(slots=True, kw_only=True)
class ErrorEvent(OmniEvent):
    """The request failed. Other requests are not affected."""

    is_terminal: ClassVar[bool] = True

    error: RequestError
