# SPDX-License-Identifier: Apache-2.0
"""What a model declares whose next step reads what its last one made: a talker (design document 000).

The loop stays inside one engine step. `FeedbackARModelRunner` knows which rows of a step are prompt, which feed a
sampled token back, and whose they are; a `FeedbackStrategy`, one for each model, turns them into embeddings. A request
keeps a *slot*, a small number that indexes the strategy's buffers (`feedback_buffers`), from its first step to its end,
preemptions included, so that a strategy works on all requests of a step at once, by indexing.

This file knows no model and no runner.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from vllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FedBackRows:
    """Rows of a step whose input is made of a token that their request has sampled. `N` of them, on the model's device.

    Attributes:
        token_ids: `[N]` int64, the sampled tokens.
        slots: `[N]` int64, the requests' slots.
        frames: `[N]` int64, how many tokens the request had sampled before that one.
    """

    token_ids: torch.Tensor
    slots: torch.Tensor
    frames: torch.Tensor


class FedBack(NamedTuple):
    """
    Attributes:
        embeds: `[N, hidden]`, the rows' input.
        outputs: What the stage emits for these rows, by name, each `[N, ...]`; nothing is emitted for other rows.
    """

    embeds: torch.Tensor
    outputs: dict[str, torch.Tensor]


class InputPiece(NamedTuple):
    """A later piece of one request's input: `information` as a stage input processor gave it, tensors on the CPU."""

    slot: int
    information: dict[str, Any]
    is_last: bool


class FeedbackStrategy(ABC):
    """One model's part of the feedback loop.

    Calls of one step come in the order in which they stand here, but for `end`, which comes first: what has ended makes
    room for what begins.
    """

    @abstractmethod
    def begin(self, slot: int, information: dict[str, Any], params: SamplingParams, is_input_complete: bool) -> None:
        """A request takes this slot, unless this raises. `information` is what came with it, tensors on the CPU."""

    @abstractmethod
    def extend(self, pieces: list[InputPiece]) -> None:
        """More input of requests that have begun: all that has arrived since the last step, in order.

        If it raises, it has taken in nothing: the pieces come again.
        """

    @abstractmethod
    def end(self, slot: int) -> None:
        """The request is over, whatever it was doing; another may take the slot."""

    @abstractmethod
    def prompt_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """`[stop - start, hidden]`, input of the prompt's rows `start..stop`. Again from 0 after a preemption or a step
        that raised."""

    @abstractmethod
    def feed_back(self, rows: FedBackRows) -> FedBack:
        """Makes what comes after each of these tokens. Called once for each token of a request, unless it raises."""

    @abstractmethod
    def replay(self, rows: FedBackRows) -> FedBack:
        """The same rows and outputs as an earlier `feed_back`, after a preemption or a step that raised: nothing may
        be drawn a second time."""

    @abstractmethod
    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """
        Args:
            slots: `[N]` int64, the requests that sample a token in this step.
            hidden_states: `[N, hidden]`, after the final norm, that their tokens are sampled from.
        """


@runtime_checkable
class SupportsFeedback(Protocol):
    """A model that is run by `FeedbackARModelRunner`. It has none of the hooks of `interfaces`."""

    def make_feedback_strategy(self, max_batch_size: int) -> FeedbackStrategy:
        """Called once, when the weights are loaded.

        Args:
            max_batch_size: The most requests of one step. Slots are the lowest numbers that are free, and can go
                beyond it, because preempted requests keep theirs: buffers that they index must be able to grow.
        """
        ...
