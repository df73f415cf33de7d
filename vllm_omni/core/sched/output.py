# SPDX-License-Identifier: Apache-2.0
"""What the schedulers send to the model runners, and what they get back, beyond vLLM's own structures."""

from dataclasses import dataclass, field, fields

import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.payloads import AdditionalInformationPayload, OmniEngineCoreRequest


@dataclass(frozen=True, slots=True)
class RequestWindow:
    """Which part of which stream a request of a one-step stage is.

    Attributes:
        stream_id: Names the stream; the pipeline's request id.
        index: Counts the stream's windows, from 0.
        is_last: No window follows.
    """

    request_id: str
    index: int
    is_last: bool

    @property
    def is_first(self) -> bool:
        return self.index == 0


@dataclass
class InputChunk:
    """A later piece of a running request's input.

    Attributes:
        index: Counts the request's chunks, from 0. After a step that raised, a runner may get a chunk again.
        information: More additional information, encoded; None where there is none.
        is_last: The input is complete now.
    """

    index: int
    information: AdditionalInformationPayload | None = None
    is_last: bool = False


class OmniRequest(Request):
    """vLLM's request as the scheduler holds it, and what must still reach the model runner.

    vLLM builds its own class; `OmniEngineCore` turns the instance into this one. Only attributes may be added here.

    Attributes:
        external_req_id: The caller's id; the sequences of one request share it.
        additional_information: Until it has a token: without one it starts again after a step that raised.
        input_chunks: Those that have not been sent to the model runner, and before them those that may be sent again.
        num_sent_chunks: How many of them were sent.
        num_chunks: All that have arrived.
        num_ready_tokens: Tokens, prompt and generated, that can be computed with the input that is here; None: all.
        is_input_complete: No chunk follows.
        emits_rows: What the model makes of it besides tokens leaves the engine.
        alone_until: Tokens that it must have computed in steps of its own before it may share one; see
            `OmniSchedulerMixin.quarantine`.
        window: Of a one-step stage, where the request is a window of a stream; None: it is a whole.
    """

    external_req_id: str
    additional_information: AdditionalInformationPayload | None
    input_chunks: list[InputChunk]
    num_sent_chunks: int
    num_chunks: int
    num_ready_tokens: int | None
    is_input_complete: bool
    emits_rows: bool
    alone_until: int
    window: RequestWindow | None

    @classmethod
    def adopt(cls, request: Request, source: OmniEngineCoreRequest) -> None:
        """Turns vLLM's request, which it has made of `source`, into one of ours."""
        request.__class__ = cls
        assert isinstance(request, cls)
        request.external_req_id = source.external_req_id or source.request_id
        request.additional_information = source.additional_information
        request.input_chunks = []
        request.num_sent_chunks = 0
        request.num_chunks = 0
        request.num_ready_tokens = None
        request.is_input_complete = True
        request.emits_rows = True
        request.alone_until = 0
        request.window = None

    @property
    def is_starved(self) -> bool:
        """Whether its next step, which computes all its tokens, needs input that is not here yet."""
        return self.num_ready_tokens is not None and self.num_tokens > self.num_ready_tokens

    @property
    def is_suspect(self) -> bool:
        return self.num_computed_tokens < self.alone_until

    def add_chunk(self, information: AdditionalInformationPayload | None, is_last: bool) -> None:
        self.input_chunks.append(InputChunk(self.num_chunks, information, is_last))
        self.num_chunks += 1

    def send_chunks(self) -> list[InputChunk]:
        """The chunks that have not been sent yet."""
        unsent = self.input_chunks[self.num_sent_chunks :]
        self.num_sent_chunks = len(self.input_chunks)
        return unsent

    def drop_sent_input(self) -> None:
        """The runners have made a token with what was sent: it is never sent again."""
        self.additional_information = None
        del self.input_chunks[: self.num_sent_chunks]
        self.num_sent_chunks = 0


@dataclass
class OmniNewRequestData(NewRequestData):
    """A request's first visit to the model runner, with its additional information still encoded."""

    additional_information: AdditionalInformationPayload | None = None
    is_input_complete: bool = True
    emits_rows: bool = True
    window: RequestWindow | None = None

    @classmethod
    def from_base(
        cls,
        data: NewRequestData,
        additional_information: AdditionalInformationPayload | None,
        is_input_complete: bool = True,
        emits_rows: bool = True,
        window: RequestWindow | None = None,
    ) -> "OmniNewRequestData":
        base = {name: getattr(data, name) for name in _NEW_REQUEST_FIELDS}
        return cls(
            **base,
            additional_information=additional_information,
            is_input_complete=is_input_complete,
            emits_rows=emits_rows,
            window=window,
        )


@dataclass
class OmniSchedulerOutput(SchedulerOutput):
    """One step, with the chunks of input that have arrived for its requests since their last steps, in order."""

    input_chunks: dict[str, list[InputChunk]] = field(default_factory=dict)

    @classmethod
    def from_base(cls, output: SchedulerOutput, input_chunks: dict[str, list[InputChunk]]) -> "OmniSchedulerOutput":
        return cls(**{name: getattr(output, name) for name in _SCHEDULER_OUTPUT_FIELDS}, input_chunks=input_chunks)


@dataclass
class OmniModelRunnerOutput(ModelRunnerOutput):
    """vLLM's output of one step, with outputs of the model beside the sampled tokens.

    Attributes:
        pooler_output: For each request, in the order of `req_ids`: outputs by name on the CPU, `[rows, ...]` each, or
            None where the request has nothing to hand over in this step.
    """

    pooler_output: list[dict[str, torch.Tensor] | None] | None = None  # type: ignore[assignment]

    @classmethod
    def from_base(
        cls, output: ModelRunnerOutput, pooler_output: list[dict[str, torch.Tensor] | None]
    ) -> "OmniModelRunnerOutput":
        base = {name: getattr(output, name) for name in _RUNNER_OUTPUT_FIELDS}
        return cls(**(base | {"pooler_output": pooler_output}))


_NEW_REQUEST_FIELDS = tuple(f.name for f in fields(NewRequestData))
_SCHEDULER_OUTPUT_FIELDS = tuple(f.name for f in fields(SchedulerOutput))
_RUNNER_OUTPUT_FIELDS = tuple(f.name for f in fields(ModelRunnerOutput))
