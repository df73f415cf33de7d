# SPDX-License-Identifier: Apache-2.0
"""The interface of a model whose next step reads the output of its last one: a talker.

The loop stays inside one engine step. `FeedbackARModelRunner` sorts a step's rows: those of a prompt, and those that
feed a sampled token back; a `FeedbackStrategy`, one for each model, turns them into embeddings. A request has a *slot*,
a small number that indexes the strategy's buffers (`feedback_buffers`), from its first step to its end, preemptions
included, so that a strategy computes all requests of a step at once, by indexing.

This file knows no model and no runner.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from vllm.sampling_params import SamplingParams

from vllm_omni.model_executor.sound_cache import SoundCache


@dataclass(frozen=True, slots=True)
class FedBackRows:
    """`N` rows of a step whose input is computed from a token that their request has sampled, on the model's device.

    Attributes:
        token_ids: `[N]` int64, the sampled tokens.
        slots: `[N]` int64, the requests' slots.
        frames: `[N]` int64, the number of tokens that the request sampled before this one.
    """

    token_ids: torch.Tensor
    slots: torch.Tensor
    frames: torch.Tensor


class FedBack(NamedTuple):
    """
    Attributes:
        embeds: `[N, hidden]`, the rows' input.
        outputs: The stage's outputs for these rows, by name, each `[N, ...]`.
        is_last: `[N]` bool, on the model's device: the request ends with this row, as with a stop token. The row's
            outputs leave; the token that is sampled from it does not. A request continues with `ignore_eos`, or while
            it has fewer than `min_tokens`. None: tokens alone decide.
    """

    embeds: torch.Tensor
    outputs: dict[str, torch.Tensor]
    is_last: torch.Tensor | None = None


class RequestInput(NamedTuple):
    """What a request starts with.

    Attributes:
        token_ids: The prompt's token ids, or placeholders.
        information: Its `additional_information`, tensors on the CPU.
        params: Its sampling parameters.
        is_complete: No `InputPiece` follows.
    """

    token_ids: list[int]
    information: dict[str, Any]
    params: SamplingParams
    is_complete: bool


class InputPiece(NamedTuple):
    """A later piece of one request's input: `information` of a stage input processor, tensors on the CPU."""

    slot: int
    information: dict[str, Any]
    is_last: bool


class FeedbackStrategy(ABC):
    """One model's part of the feedback loop.

    The two sequences of a request with guidance have one slot: each token is fed back once, and the rows of both
    sequences have the same input. Only their prompts differ, and the states that their token is sampled from.

    A step calls the methods in this order, except `end`, which comes first: ended requests free their slots.

    Attributes:
        sound_cache: Of a model that encodes sounds of its prompts.
        row_mask: Of a model with two kinds of rows: `[max_num_batched_tokens]` bool on its device, which its layers
            read. Before each forward the runner writes True for rows that are fed back, and the `prompt_mask`.
        takes_guidance: It has `twin_rows` and `save_twin_states`, for requests with guidance.
    """

    sound_cache: SoundCache | None = None
    row_mask: torch.Tensor | None = None
    takes_guidance: ClassVar[bool] = False

    @abstractmethod
    def begin(self, slot: int, request: RequestInput) -> None:
        """A request takes this slot, unless this raises."""

    @abstractmethod
    def extend(self, pieces: list[InputPiece]) -> None:
        """More input of started requests: everything received since the last step, in order.

        If it raises, it has changed nothing: the pieces come again.
        """

    @abstractmethod
    def end(self, slot: int) -> None:
        """The request has ended, in any state; another can take the slot."""

    @property
    def buffer_bytes(self) -> int:
        """Device memory for requests that is allocated from the start, for the estimate before anything is loaded."""
        return 0

    @abstractmethod
    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """`[stop - start, hidden]`, the input of the prompt's rows `start..stop`; from 0 again after a preemption or a
        step that raised."""

    def prompt_mask(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """`[stop - start]` bool, the `row_mask` of the prompt's rows `start..stop`, for a strategy that has one."""
        raise NotImplementedError("this model's rows are of one kind")

    def twin_rows(self, start: int, stop: int) -> torch.Tensor:
        """`[stop - start, hidden]`, the input of rows `start..stop` of the unconditional prompt. It is the same for all
        requests: this can be called before `begin`."""
        raise NotImplementedError("this model's feedback strategy has no guidance")

    def first_outputs(self, slot: int) -> dict[str, torch.Tensor]:
        """Outputs by name, each `[n, ...]` with any n, that leave before those of the first row that is fed back: with
        the step that samples the first token. Called again if that step raises."""
        return {}

    @abstractmethod
    def feed_back(self, rows: FedBackRows) -> FedBack:
        """Computes the input after each of these tokens. Called once for each token of a request, unless it raises."""

    @abstractmethod
    def replay(self, rows: FedBackRows) -> FedBack:
        """Repeats an earlier `feed_back` after a preemption or a step that raised; nothing is sampled a second time."""

    @abstractmethod
    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """
        Args:
            slots: `[N]` int64, the requests that sample a token in this step.
            hidden_states: `[N, hidden]`, after the final norm, that their tokens are sampled from.
        """

    def save_twin_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Saves the states of unconditional sequences, as `save_hidden_states`."""
        raise NotImplementedError("this model's feedback strategy has no guidance")


@runtime_checkable
class SupportsFeedback(Protocol):
    """A model for the `FeedbackARModelRunner`. It has no hooks of `interfaces`."""

    def make_feedback_strategy(self, max_batch_size: int) -> FeedbackStrategy:
        """Called once, when the weights are loaded; on the meta device for an estimate of its `buffer_bytes`.

        Args:
            max_batch_size: The most requests of one step. A request gets the lowest free slot. Slots can exceed this
                number, because preempted requests keep theirs: the buffers must be able to grow.
        """
        ...
