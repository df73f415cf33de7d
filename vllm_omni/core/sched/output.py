# SPDX-License-Identifier: Apache-2.0
"""The messages between our schedulers and model runners: vLLM's structures with further fields."""

from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.core.sched.row_cache import RequestRows
from vllm_omni.core.sched.row_hashes import RowHasher, digest_rows
from vllm_omni.payloads import AdditionalInformationPayload, OmniEngineCoreRequest


@dataclass(frozen=True, slots=True)
class RequestWindow:
    """The window of a pipeline's request that a request of a one-step stage computes.

    Attributes:
        request_id: The pipeline's.
        index: Counts the request's windows, from 0.
        is_last: No window follows.
        streams: The output is read while it is made.
        due: When a player has played the windows before it; of a first window: when the request arrived
            (`time.monotonic()`).
    """

    request_id: str
    index: int
    is_last: bool
    streams: bool = False
    due: float = 0.0

    @property
    def is_first(self) -> bool:
        return self.index == 0


@dataclass(frozen=True, slots=True)
class GuidedPair:
    """The two sequences of a request with guidance, by id.

    Attributes:
        guided: The request.
        twin: Its unconditional sequence.
        scale: See `payloads.Guidance`.
    """

    guided: str
    twin: str
    scale: float

    def other(self, req_id: str) -> str:
        """The sequence that is not `req_id`."""
        return self.twin if req_id == self.guided else self.guided


@dataclass
class InputChunk:
    """A later piece of a running request's input.

    Attributes:
        index: Counts the request's chunks, from 0. After a step that raised, a runner can get a chunk again.
        information: Further additional information, encoded, or None.
        is_last: The input is complete now.
    """

    index: int
    information: AdditionalInformationPayload | None = None
    is_last: bool = False


class OmniRequest(Request):
    """vLLM's request in the scheduler, and the input that the model runner does not have yet.

    vLLM builds its own class; `OmniEngineCore` turns the instance into this one. Attributes have their defaults here.

    Attributes:
        external_req_id: The caller's id; the sequences of one request share it.
        owner: As in `OmniEngineCoreRequest`.
        additional_information: Until the request has a token: without one it starts again after a step that raised.
        input_chunks: Those that may be sent to the model runner again, and those that were not sent yet.
        num_chunks: Received so far.
        num_sent_chunks: Sent so far, from the first one on.
        num_ready_tokens: Tokens, prompt and generated, that can be computed with the input so far; None: all.
        is_input_complete: No chunk follows.
        emits_rows: The model's rows leave the engine, besides tokens.
        reads_rows: The model reads rows instead of tokens, which identify its prompt in the prefix cache.
        ends_here: The model ends it with the output that is being processed.
        rows: What it has of the emitted ones, where these are cached; from its first step on.
        alone_until: Tokens to compute in steps of its own before it can share one; see `OmniSchedulerMixin.isolate`.
        window: Of a one-step stage; None: the request is whole.
        pair: Of both sequences of a request with guidance; see `GuidedScheduler`.
        twin: The other one of the two, until they end.
    """

    external_req_id: str
    owner: str
    additional_information: AdditionalInformationPayload | None
    input_chunks: list[InputChunk]
    num_chunks: int = 0
    num_sent_chunks: int = 0
    num_ready_tokens: int | None = None
    is_input_complete: bool = True
    emits_rows: bool = True
    reads_rows: bool = False
    ends_here: bool = False
    rows: RequestRows
    alone_until: int = 0
    window: RequestWindow | None = None
    pair: GuidedPair | None = None
    twin: "OmniRequest | None" = None

    @classmethod
    def adopt(cls, request: Request, source: OmniEngineCoreRequest) -> None:
        """Turns vLLM's request, which it made of `source`, into one of ours."""
        request.__class__ = cls
        assert isinstance(request, cls)
        request.external_req_id = source.external_req_id or source.request_id
        request.owner = source.owner
        request.additional_information = source.additional_information
        request.input_chunks = []

    def hash_rows(self, names: list[str], block_size: int) -> None:
        """Identifies its blocks by rows that it reads, see `StageInput.token_information`. Call it before scheduling.

        Args:
            block_size: Tokens of a hash.

        Raises:
            ValueError: The additional information lacks a name.
        """
        self.reads_rows = True
        if self._block_hasher is not None:
            information = self.additional_information or AdditionalInformationPayload({})
            self._block_hasher = RowHasher(self._block_hasher, digest_rows(information, names, block_size))
            self.block_hashes.clear()
            self.update_block_hashes()

    def pair_with(self, twin: "OmniRequest", scale: float) -> None:
        """
        Args:
            twin: The unconditional sequence. Only tokens are computed for it.
        """
        self.pair = twin.pair = GuidedPair(self.request_id, twin.request_id, scale)
        self.twin, twin.twin = twin, self
        twin.emits_rows = False

    @property
    def is_unconditional(self) -> bool:
        return self.pair is not None and self.pair.twin == self.request_id

    @property
    def is_starved(self) -> bool:
        """Whether its next step, which computes all its tokens, needs input that has not arrived."""
        num_tokens = self.num_tokens + self.num_output_placeholders
        return self.num_ready_tokens is not None and num_tokens > self.num_ready_tokens

    @property
    def is_isolated(self) -> bool:
        return self.num_computed_tokens < self.alone_until

    def add_chunk(self, information: AdditionalInformationPayload | None, is_last: bool) -> None:
        self.input_chunks.append(InputChunk(self.num_chunks, information, is_last))
        self.num_chunks += 1

    def send_chunks(self) -> list[InputChunk]:
        """The chunks that have not been sent yet."""
        unsent = [chunk for chunk in self.input_chunks if chunk.index >= self.num_sent_chunks]
        self.num_sent_chunks = self.num_chunks
        return unsent

    @property
    def may_resend_input(self) -> bool:
        """Whether input that was sent is kept: a step that raises makes it necessary to send it again."""
        chunks = self.input_chunks
        return self.additional_information is not None or (bool(chunks) and chunks[0].index < self.num_sent_chunks)

    def drop_sent_input(self, num_chunks: int) -> None:
        """The runners have sampled a token with so many chunks of its input, which are never sent again."""
        self.additional_information = None
        self.input_chunks = [chunk for chunk in self.input_chunks if chunk.index >= num_chunks]


class _Extended:
    """A dataclass of vLLM with further fields."""

    @classmethod
    def from_base(cls, base: Any, **added: Any) -> Self:
        return cls(**({f.name: getattr(base, f.name) for f in fields(base)} | added))


@dataclass
class OmniNewRequestData(_Extended, NewRequestData):
    """A new request for the model runner, with its additional information encoded."""

    additional_information: AdditionalInformationPayload | None = None
    is_input_complete: bool = True
    emits_rows: bool = True
    window: RequestWindow | None = None
    pair: GuidedPair | None = None


@dataclass(slots=True)
class StepRecord:
    """The bookkeeping of one step, which travels with its scheduler output until its outputs have been processed.

    It has ids and numbers only, because a worker in another process gets a copy.

    Attributes:
        started: When its scheduling began (`time.perf_counter()`).
        num_tokens: That it computes.
        num_sequences: That it computes; the two of a request with guidance count as one.
        num_computed_tokens: By the caller's id of each of its requests, how many tokens are computed after it (the most
            of several sequences of a request).
        num_sent_chunks: By vLLM's id of each of its requests whose input is kept to be sent again, how many chunks of
            it were sent up to this step.
        has_output: Whether it was computed: its requests have, or are about to get, its tokens.
    """

    started: float = 0.0
    num_tokens: int = 0
    num_sequences: int = 0
    num_computed_tokens: dict[str, int] = field(default_factory=dict)
    num_sent_chunks: dict[str, int] = field(default_factory=dict)
    has_output: bool = False


@dataclass
class OmniSchedulerOutput(_Extended, SchedulerOutput):
    """One step, with the chunks of input that its requests have received since their last steps, in order."""

    input_chunks: dict[str, list[InputChunk]] = field(default_factory=dict)
    step: StepRecord = field(default_factory=StepRecord)


@dataclass
class OmniModelRunnerOutput(_Extended, ModelRunnerOutput):
    """vLLM's output of one step, with outputs of the model beside the sampled tokens.

    Attributes:
        pooler_output: For each request, in the order of `req_ids`: outputs by name on the CPU, `[rows, ...]` each, or
            None for no output in this step.
        ended_req_ids: Requests that the model ends with this step, without the token that it has sampled.
    """

    pooler_output: list[dict[str, torch.Tensor] | None] | None = None  # type: ignore[assignment]
    ended_req_ids: frozenset[str] = frozenset()
