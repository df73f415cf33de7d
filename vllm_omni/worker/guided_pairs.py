# SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance in a model runner: the logits of two sequences become those of one, which get one token.

It knows ids and rows, and no scheduler: whichever of the two a step computes, they sample together or not at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_omni.core.sched.output import GuidedPair


@dataclass(frozen=True)
class StepPairs:
    """The pairs of one step, by index in its batch.

    Attributes:
        guided, twins: Of the pairs that sample a token: the request, and its unconditional sequence.
        scales: Of these pairs.
        waiting: Ids of sequences that would sample a token, but whose other one would not.
    """

    guided: list[int] = field(default_factory=list)
    twins: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)

    def combine(self, logits: torch.Tensor) -> None:
        """Writes the guided logits of each pair in place of the request's. A token that the request must not have stays
        at minus infinity; at a scale of 1 they are the request's own, bit by bit.

        Args:
            logits: `[num_reqs, vocab]`.
        """
        if not self.guided:
            return
        guided, twins = self._rows(logits.device)
        scales = async_tensor_h2d(np.array(self.scales, dtype=np.float32), device=logits.device)
        cond, uncond = logits[guided].float(), logits[twins].float()
        combined = uncond + (cond - uncond) * scales[:, None]
        is_own = cond.isneginf() | (scales == 1)[:, None]
        logits[guided] = torch.where(is_own, cond, combined).to(logits.dtype)

    def share_tokens(self, token_ids: torch.Tensor) -> None:
        """Gives each unconditional sequence the token of its request. `token_ids`: `[num_reqs, 1]`."""
        if self.guided:
            guided, twins = self._rows(token_ids.device)
            token_ids[twins] = token_ids[guided]

    def _rows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        guided, twins = async_tensor_h2d(np.array((self.guided, self.twins)), device=device)
        return guided, twins


NO_PAIRS = StepPairs()


class GuidedPairs:
    """The pairs of a runner's requests, from the first step of one sequence to the end of one."""

    def __init__(self) -> None:
        self._pairs: dict[str, GuidedPair] = {}  # by both ids

    def __len__(self) -> int:
        return len(self._pairs) // 2

    def add(self, pair: GuidedPair) -> None:
        """Each of the two sequences has its pair, and can be the first to come."""
        self._pairs[pair.guided] = self._pairs[pair.twin] = pair

    def of(self, req_id: str) -> GuidedPair | None:
        """The pair of a sequence; None for a request without guidance."""
        return self._pairs.get(req_id)

    def is_twin(self, req_id: str) -> bool:
        """Whether a sequence is the unconditional one of a pair."""
        pair = self.of(req_id)
        return pair is not None and pair.twin == req_id

    def remove(self, req_id: str) -> None:
        """Removes the pair of a sequence that ends; does nothing for any other request."""
        pair = self._pairs.pop(req_id, None)
        if pair is not None:
            del self._pairs[pair.other(req_id)]

    def select(self, sampling: Callable[[str], int | None]) -> StepPairs:
        """
        Args:
            sampling: The index in the batch of a sequence for which this step can sample; None for any other.
        """
        if not self._pairs:
            return NO_PAIRS
        step = StepPairs()
        for pair in set(self._pairs.values()):
            guided, twin = sampling(pair.guided), sampling(pair.twin)
            if guided is not None and twin is not None:
                step.guided.append(guided)
                step.twins.append(twin)
                step.scales.append(pair.scale)
            elif guided is not None:
                step.waiting.add(pair.guided)
            elif twin is not None:
                step.waiting.add(pair.twin)
        return step
